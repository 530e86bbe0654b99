"""Readers, masks, draft vocabularies, batches and stored features."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jspec.tokenizer import Tokenizer
from train.data import (
    BatchConfig,
    Example,
    Record,
    Schedule,
    count_draft_vocab,
    iterate,
    load_dataset,
    read_records,
    render,
    split,
)
from train.data.batches import needed_rows
from train.data.chat import Unusable
from train.data.features import FeatureShape, FeatureStore
from train.data.inspect import marked
from train.data.vocab import DraftVocab

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}<|im_end|>{%- endgeneration -%}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "\ncd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "fé"},
]


def tokenizer(template=PLAIN):
    """Bytes, merged where a line break doubles; chat tokens are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    rust = RustTokenizer(models.BPE(vocab, [("Ċ", "Ċ")]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    backend = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>")
    backend.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    backend.chat_template = template
    return Tokenizer(backend)


def record(**content):
    return Record(id="r", place="here", **content)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def sharegpt(count):
    return [
        {"id": f"c{i}", "conversations": [
            {"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}]}
        for i in range(count)
    ]  # fmt: skip


def test_sharegpt_is_streamed(tmp_path):
    path = write(tmp_path / "s.json", json.dumps(sharegpt(3)))
    found = list(read_records(path))
    assert [r.id for r in found] == ["c0", "c1", "c2"]
    assert found[1].messages == (
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "a1"},
    )


@pytest.mark.parametrize("cut", [0.35, 0.7, 0.95])
def test_a_file_that_breaks_off_gives_every_whole_record(tmp_path, cut):
    text = json.dumps(sharegpt(40))
    short = text[: int(cut * len(text))]
    whole = short.count("}]}")
    path = write(tmp_path / "s.json", short)
    with pytest.warns(UserWarning, match=rf"record {whole}, at byte {len(short)}.*{whole} whole"):
        assert len(list(read_records(path))) == whole
    lines = "".join(json.dumps(x) + "\n" for x in sharegpt(9))
    path = write(tmp_path / "s.jsonl", lines[:-5])
    with pytest.warns(UserWarning, match="inside line 9: its 8 whole"):
        assert len(list(read_records(path))) == 8


def test_a_broken_archive_gives_what_can_be_unpacked(tmp_path):
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 122, 400))) for _ in range(200)]
    packed = gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode())
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.warns(UserWarning, match="breaks off after line"):
        found = list(read_records(path))
    assert 50 < len(found) < 150
    assert [r.text for r in found] == texts[: len(found)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.json", '[{"id": 1 "b"}]', "broken JSON after record"),
        ("x.json", "[]", "no records"),
        ("x.jsonl", '{"text": "a"}\n{broken}\n{"text": "b"}\n', ":2: broken JSON"),
        ("x.jsonl", '{"messages": [{"role": "wizard", "content": ""}]}\n', "'wizard' is unknown"),
        ("x.jsonl", '{"input_ids": [1, 2], "loss_mask": [1]}\n', "`loss_mask` of 2"),
        ("x.jsonl", '{"prompt": "a"}\n', "expected `messages`"),
        ("x.csv", "a,b", "cannot tell what is in a .csv file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, text, says):
    with pytest.raises(ValueError, match=says):
        list(read_records(write(tmp_path / name, text)))


def test_plain_text_is_supervised_whole(tmp_path):
    path = write(tmp_path / "t.txt", "ab\ncd\n\n\nef\n")
    found = [render(r, tokenizer()) for r in read_records(path)]
    assert [len(e.tokens) for e in found] == [5, 2]
    assert all(e.mask.all() for e in found)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_answers_and_their_ends_are_supervised(template):
    words = tokenizer(template)
    example = render(record(messages=tuple(CHAT)), words)
    spans = [s.split("⟧")[0] for s in str(marked(example, words)).split("⟦")[1:]]
    # The first answer begins with a line break, which the template's own one swallows: the token
    # is the prompt's, and so not supervised.
    assert spans == ["cd<|im_end|>", "fé<|im_end|>"]
    assert example.tokens[example.mask][-1] in words.eos_token_ids
    last = render(record(messages=tuple(CHAT)), words, last_turn_only=True)
    assert last.mask.sum() == len("fé".encode()) + 1


def test_an_answer_by_the_target_keeps_its_tokens():
    words = tokenizer()
    ids = (5, 6, 7)
    example = render(record(messages=tuple(CHAT[:2]), answer_ids=ids), words)
    prompt = words.encode_chat(CHAT[:1])
    assert example.tokens.tolist() == [*prompt, *ids]
    assert example.mask.tolist() == [False] * len(prompt) + [True] * 3  # no end token appeared


def test_what_cannot_be_learnt_from_is_counted_or_refused(tmp_path):
    words = tokenizer()
    with pytest.raises(Unusable, match="no assistant turn"):
        render(record(messages=(CHAT[0],)), words)
    records = [record(messages=(CHAT[0],)), record(messages=tuple(CHAT))]
    data = load_dataset(records, words, max_length=100)
    assert (data.records, len(data.examples)) == (2, 1)
    assert data.skipped == {"no assistant turn": 1}
    with pytest.raises(ValueError, match="all 1"):
        load_dataset([record(messages=tuple(CHAT))], all_supervised(), max_length=100)
    with pytest.raises(ValueError, match="no usable examples"):
        load_dataset([record(input_ids=(1, 2), loss_mask=(0, 0))], None, max_length=9)


def all_supervised():
    return tokenizer("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}"
                     "{% endgeneration %}")  # fmt: skip


def test_the_sides_share_no_prompt_and_do_not_move():
    def example(prompt, answer):
        mask = np.asarray([0] * 4 + [1] * 3, bool)
        return Example(id="", tokens=np.asarray([prompt] * 4 + [answer] * 3, np.int32), mask=mask)

    all_ = [example(p, a) for p in range(200) for a in range(3)]
    left, right = split(all_, 0.1)
    assert 20 < len(right) < 120
    assert not {e.tokens[0] for e in left} & {e.tokens[0] for e in right}
    again = split(all_[:300], 0.1)[1]
    assert [e.tokens.tolist() for e in again] == [e.tokens.tolist() for e in right][: len(again)]


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        size = int(rng.integers(8, 60))
        tokens = rng.integers(1, 50, size).astype(np.int32)
        found.append(Example(id=str(i), tokens=tokens, mask=np.arange(size) >= size // 3))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_every_example_comes_once_an_epoch_in_few_shapes(packing):
    examples = texts(60)
    config = BatchConfig(tokens=256, max_length=64, shortest=16, packing=packing, lookback=2)
    schedule = Schedule(examples, config)
    orders = []
    for epoch in range(2):
        seen = []
        for i in range(schedule.batches_per_epoch):
            batch = schedule[epoch * schedule.batches_per_epoch + i]
            assert (*batch.tokens.shape, batch.rows.shape[1]) in schedule.shapes
            for b, row in enumerate(batch.documents):
                for document in range(row.max() + 1):
                    where = row == document
                    index = int(batch.examples[b, where][0])
                    seen.append(index)
                    np.testing.assert_array_equal(batch.tokens[b, where], examples[index].tokens)
                    np.testing.assert_array_equal(batch.mask[b, where], examples[index].mask)
                    assert batch.positions[b, where].tolist() == list(range(where.sum()))
                    start = int(np.flatnonzero(where)[0])
                    needed = start + np.flatnonzero(needed_rows(examples[index].mask, 2))
                    assert set(needed) <= set(batch.rows[b])
        assert sorted(seen) == list(range(60))
        orders.append(seen)
    assert orders[0] != orders[1]
    padding = sum(int((schedule[i].documents < 0).sum()) for i in range(5))
    assert not packing or padding < 0.25 * 5 * 256


def test_iteration_goes_on_where_it_was():
    schedule = Schedule(texts(20), BatchConfig(tokens=128, max_length=64))
    one = iterate(schedule)
    for _ in range(7):
        next(one)
    state = json.loads(json.dumps(one.get_state()))
    rest = [next(one).tokens for _ in range(9)]
    other = iterate(schedule)
    other.set_state(state)
    for tokens in rest:
        np.testing.assert_array_equal(next(other).tokens, tokens)


def test_draft_vocabulary(tmp_path):
    examples = texts(30)
    vocab = count_draft_vocab(examples, size=20, vocab_size=64, always=[0, 60], key="k")
    counts = np.bincount(np.concatenate([e.tokens[e.mask] for e in examples]), minlength=64)
    chosen = [i for i in vocab.ids if i not in (0, 60)]
    assert {0, 60} <= set(vocab.ids.tolist())
    assert counts[chosen].min() >= np.sort(counts)[::-1][18 - 1]
    np.testing.assert_array_equal(np.arange(20) + vocab.d2t, np.flatnonzero(vocab.t2d))
    assert vocab.covered == pytest.approx(counts[vocab.ids].sum() / counts.sum())
    # More than there are distinct tokens: filled up, always the same way.
    wide = count_draft_vocab(examples, size=60, vocab_size=64, key="k")
    assert len(set(wide.ids.tolist())) == 60
    vocab.save(tmp_path)
    assert DraftVocab.load(tmp_path, "k").ids.tolist() == vocab.ids.tolist()
    with pytest.raises(ValueError, match="other data or another tokenizer"):
        DraftVocab.load(tmp_path, "another")
    with pytest.raises(ValueError, match="expected 2"):
        count_draft_vocab(examples, size=1, vocab_size=64, always=[0, 60])


def test_stored_features_come_back_in_any_arrangement(tmp_path):
    examples = texts(12)
    shape = FeatureShape(layers=(0, 2), hidden_size=8)
    store = FeatureStore(tmp_path, examples, shape, fingerprint="f")
    packed = Schedule(examples, BatchConfig(tokens=128, max_length=64, packing=True))
    rng = np.random.default_rng(0)
    for i in range(packed.batches_per_epoch):
        batch = packed[i]
        assert not store.has_all(batch)
        states = rng.integers(-8, 8, (3, *batch.tokens.shape, 8)).astype(np.float32)
        # The value says which token of which example it is.
        total = batch.examples * 100.0 + batch.positions
        store.add(batch, states[:2], states[2], batch.tokens, total.astype(np.float32))
    again = FeatureStore(tmp_path, examples, shape, fingerprint="f")
    assert len(again.missing()) == 0
    other = Schedule(examples, BatchConfig(tokens=64, max_length=64, packing=False))
    for i in range(other.batches_per_epoch):
        batch = other[i]
        real = batch.examples >= 0
        found = again.batch(batch)
        assert found["features"].shape == (*batch.tokens.shape, 2, 8)
        np.testing.assert_array_equal(found["top"][real], batch.tokens[real])
        np.testing.assert_array_equal(
            found["total"][real], (batch.examples * 100 + batch.positions)[real]
        )
    with pytest.raises(ValueError, match="something else"):
        FeatureStore(tmp_path, examples, shape, fingerprint="g")


def test_markers_are_found_however_they_are_written():
    from train.data.chat import _has_markers

    for text in ("{% generation %}", "{%- generation -%}", "{%generation%}"):
        assert _has_markers(SimpleNamespace(chat_template=text))
    assert not _has_markers(SimpleNamespace(chat_template="{{ generation }}"))
