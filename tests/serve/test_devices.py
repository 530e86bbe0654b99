"""Replicas and split weights write the tokens that one device writes."""

import pytest
from own_process import run_python
from tiny_models import tiny_target

import jspec
from serve.devices import replicate

SCRIPT = """
import os
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
import json, sys
sys.path.insert(0, "tests/helpers")
import jspec, serve
from serve.devices import replicate
from tiny_models import tiny_target

prompts = json.load(sys.stdin)
target = tiny_target(num_layers=1)
tree = jspec.TreeConfig(num_steps=2, topk=1, num_nodes=3)
engine = jspec.Engine(target, "ngram", tree=tree, implementation="xla")
asked = jspec.SamplingParams(max_new_tokens=10)
texts = []
for data, split in ((1, 1), (2, 1), (1, 2)):
    used = []
    for replica in replicate(engine, data_parallel=data, tensor_parallel=split):
        with serve.Server(replica.engine, slots=2, capacity=128, replica=replica) as server:
            handles = [server.submit(prompt, asked) for prompt in prompts]
            texts.append([handle.result(300).token_ids for handle in handles])
        cache = server._table.state.cache.keys[0]
        held = sorted(device.id for device in cache.sharding.device_set)
        used.append([held, cache.sharding.shard_shape(cache.shape)[2]])
    texts.append(used)
json.dump(texts, sys.stdout)
"""


@pytest.mark.once
def test_same_tokens_on_eight_virtual_devices():
    one, used_one, first, second, used_two, split, used_split = run_python(
        SCRIPT, [[5, 9, 2], [7] * 11, [1, 2, 3] * 3]
    )
    assert one == first == second == split
    assert used_one == [[[0], 2]]
    assert used_two == [[[0], 2], [[1], 2]]
    assert used_split == [[[0, 1], 1]]  # each device holds one of two key heads


def test_refuses_what_cannot_be_split():
    target = tiny_target(num_layers=1)
    with pytest.raises(ValueError, match="needs 64 devices"):
        replicate(jspec.Engine(target), data_parallel=64)
    with pytest.raises(NotImplementedError, match="implementation='xla'"):
        replicate(jspec.Engine(target), tensor_parallel=2)
    odd = tiny_target(num_layers=1, num_heads=3, num_kv_heads=3)
    with pytest.raises(ValueError, match="3 heads"):
        replicate(jspec.Engine(odd, implementation="xla"), tensor_parallel=2)
    with pytest.raises(ValueError, match="data_parallel=0"):
        replicate(jspec.Engine(target), data_parallel=0)
