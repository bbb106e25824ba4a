"""Incremental detokenisation: the pieces of a completion's text are those of the whole."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rl_rollout.http.text import TextStream

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "数学は楽しい。 Größe, naïve café 😀👩‍👧",
    "1 + 2 = 3; f(x)",
] * 20


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"])


def sentence_pieces():
    """As those of Llama 2 and Mistral: a word begins with its space, and unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<eos>", "<tool>"]
    return tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=special)


def word_pieces():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "<eos>"])


class InPython:
    """A tokenizer that knows no streams."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def decode(self, ids, skip_special_tokens):
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def streamed(tokenizer, ids, step):
    text = TextStream(tokenizer, ())
    pieces = [text.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return "".join([*pieces, text.finish(drop_last=False)])


@pytest.mark.parametrize("is_native", [True, False], ids=["tokenizers", "python"])
@pytest.mark.parametrize("make", [byte_level, sentence_pieces, word_pieces])
def test_the_pieces_make_up_the_whole_text(make, is_native):
    tokenizer, trainer = make()
    tokenizer.train_from_iterator(CORPUS, trainer)
    used = tokenizer if is_native else InPython(tokenizer)
    draw = random.Random(0)
    for length in (*range(1, 40), 200):  # special tokens, half characters and invalid bytes among them
        ids = [draw.randrange(tokenizer.get_vocab_size()) for _ in range(length)]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert streamed(used, ids, 1) == streamed(used, ids, 3) == whole


def test_a_word_behind_a_special_token_keeps_its_space():
    tokenizer, trainer = sentence_pieces()
    tokenizer.train_from_iterator(CORPUS, trainer)
    ids = [*tokenizer.encode("fox").ids, tokenizer.token_to_id("<tool>"), *tokenizer.encode("dog").ids]
    assert streamed(tokenizer, ids, 1) == tokenizer.decode(ids, skip_special_tokens=True) == "fox dog"
