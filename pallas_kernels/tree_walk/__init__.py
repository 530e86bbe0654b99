"""Which drafted tokens are accepted: the greedy and the sampling walk."""
