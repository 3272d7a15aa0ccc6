"""Text generation with a language model: choose the next token of each row until all rows have
ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libai.inference.decoders import Decoder
from libai.inference.native_decoder import NativeDecoder, can_decode
from libai.parallel import Layout, LocalLayout, Mesh
from libai.utils.errors import UserError
from libai.utils.sizes import check_range, check_sizes


@dataclass(frozen=True)
class GenerationOptions:
    """Options for choosing tokens.

    Args: max_new_tokens: maximum number of new tokens for each prompt. temperature: 0 takes the
        most likely token. Otherwise the scores are divided by it before sampling. top_k: sample
        from this number of most likely tokens; 0 means all. top_p: sample from the most likely
        tokens whose probabilities add up to this value. num_beams: number of beams. Above 1, beam
        search returns the most likely continuation. length_penalty: beams are compared by log
        probability / length^length_penalty. stop_token: token that ends a row and is its last
        token, or a list of such tokens, or None. seed: random seed for sampling. The results do
        not depend on the other prompts.
    """

    max_new_tokens: int = 20
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    stop_token: int | Sequence[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes(max_new_tokens=self.max_new_tokens, num_beams=self.num_beams)
        check_range("0 <= x < inf", temperature=self.temperature, top_k=self.top_k, seed=self.seed)
        check_range("-100 <= x < inf", length_penalty=self.length_penalty)
        check_range("0 < x <= 1", top_p=self.top_p)
        if self.num_beams > 1 and self.temperature > 0:
            raise UserError(
                f"num_beams={self.num_beams} means beam search, but "
                f"temperature={self.temperature} means sampling: use one of them."
            )

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The stop tokens as a tuple, which may be empty."""
        found = () if self.stop_token is None else self.stop_token
        return (found,) if isinstance(found, int) else tuple(found)


class Generator:
    """Continues prompts with a causal language model (`GPT`, `Llama`), or answers them with `T5`.

    The model is put into eval mode.

    Args:
        layout: result of `libai.parallel.parallelize`, if the model's weights are split across
            ranks (tensor parallelism). Every rank must then make the same calls and gets all
            tokens. By default the model is local.
    """

    def __init__(self, model: Any, layout: Layout | None = None):
        layout = layout or LocalLayout(Mesh(device=next(model.parameters()).device.type))
        kind = NativeDecoder if can_decode(model, layout) else Decoder
        self._decoder = kind(model.eval(), layout)
        self._max_length: int = model.max_seq_length
        self._vocab_size: int = model.token_embedding.weight.shape[0]
        #: limit for a model with an encoder: the encoder reads the prompts, and the decoder begins
        #: with one token
        self._max_target_length: int | None = getattr(model, "max_target_length", None)
        self._start_token: int = getattr(model, "start_token", 0)

    def generate(
        self, prompts: Sequence[Sequence[int]], options: GenerationOptions | None = None
    ) -> list[list[int]]:
        """Return the new tokens of each prompt.

        Prompts may have different lengths, which do not affect the results.
        """
        options = options or GenerationOptions()
        if options.num_beams > 1:
            return self._search(prompts, options)
        steps = np.stack(list(self.stream(prompts, options)), axis=1)
        return [_until_stop(row, options.stop_tokens) for row in steps.tolist()]

    def stream(
        self, prompts: Sequence[Sequence[int]], options: GenerationOptions | None = None
    ) -> Iterator[np.ndarray]:
        """Yield the next token of every prompt, (prompts,) int64, as soon as it is computed.

        Rows that have ended repeat their stop token. Beam search cannot be streamed, because its
        tokens are only known at the end.
        """
        options = options or GenerationOptions()
        if options.num_beams > 1:
            raise UserError(
                f"num_beams={options.num_beams}: beams cannot be streamed. Use generate."
            )
        has_ended = np.zeros(len(prompts), bool)
        last = np.zeros(len(prompts), np.int64)
        scores = self._start(prompts, options)
        random = _generators(prompts, options.seed)
        for step in range(options.max_new_tokens):
            tokens = np.array([_choose(row, options, rng) for row, rng in zip(scores, random)])
            tokens = np.where(has_ended, last, tokens)
            has_ended |= np.isin(tokens, options.stop_tokens)
            last = tokens
            yield tokens
            if has_ended.all() or step + 1 == options.max_new_tokens:
                return
            scores = self._decoder.append(tokens)

    def room_for(self, prompts: Sequence[Sequence[int]]) -> int:
        """Return the maximum number of new tokens that the model's positions allow, at least 1."""
        if self._max_target_length is not None:
            return self._max_target_length - 1
        return max(1, self._max_length - max(map(len, prompts)))

    def _start(self, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> np.ndarray:
        longest = max(map(len, prompts), default=0)
        if not all(map(len, prompts)) or not longest:
            raise UserError("a prompt has no tokens. It needs at least one.")
        with_prompt = (
            longest + options.max_new_tokens if self._max_target_length is None else longest
        )
        if not 0 <= min(map(min, prompts)) <= max(map(max, prompts)) < self._vocab_size:
            raise UserError(
                "a prompt has a token outside the model's vocabulary, 0 … "
                f"{self._vocab_size - 1}. Does the tokenizer belong to the model?"
            )
        if with_prompt > self._max_length:
            raise UserError(
                f"a prompt of {longest} tokens and max_new_tokens={options.max_new_tokens} exceed "
                f"the model's {self._max_length} positions. Reduce one of them."
            )
        tokens = np.zeros((len(prompts), longest), np.int64)
        is_token = np.zeros(tokens.shape, bool)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = prompt
            is_token[row, longest - len(prompt) :] = True
        if self._max_target_length is None:
            return self._decoder.start(tokens, is_token, with_prompt)
        if options.max_new_tokens >= self._max_target_length:
            raise UserError(
                f"max_new_tokens={options.max_new_tokens} and a start token exceed the model's "
                f"max_target_length={self._max_target_length}. Lower max_new_tokens."
            )
        self._decoder.encode(tokens, is_token)
        first = np.full((len(prompts), 1), self._start_token)
        return self._decoder.start(first, np.ones_like(first, bool), 1 + options.max_new_tokens)

    def _search(
        self, prompts: Sequence[Sequence[int]], options: GenerationOptions
    ) -> list[list[int]]:
        """Run beam search on all prompts at once, with `num_beams` rows per prompt."""
        width = options.num_beams
        searches = [_Beams(options) for _ in prompts]
        scores = self._start([prompt for prompt in prompts for _ in range(width)], options)
        for step in range(options.max_new_tokens):
            log_probs = _log_softmax(scores).reshape(len(prompts), width, -1)
            rows = []
            for i, search in enumerate(searches):
                rows += [i * width + beam for beam in search.extend(log_probs[i])]
            if step + 1 == options.max_new_tokens or all(search.is_done for search in searches):
                break
            self._decoder.select(np.array(rows))
            scores = self._decoder.append(
                np.array([text[-1] for search in searches for text in search.texts])
            )
        return [search.best() for search in searches]


class _Beams:
    """The continuations of one prompt.

    As in `transformers`, a continuation ends if its stop token is among the `num_beams` best
    candidates. A prompt is done when it has `num_beams` ended continuations and no open beam is
    better.
    """

    def __init__(self, options: GenerationOptions):
        self._options = options
        self._totals = np.full(options.num_beams, -np.inf)
        self._totals[0] = 0.0  # all rows are equal at first
        self.texts: list[list[int]] = [[] for _ in self._totals]
        self._ended: list[tuple[float, list[int]]] = []
        self.is_done = False

    def extend(self, log_probs: np.ndarray) -> list[int]:
        """Extend the best continuations by one token, given log probabilities (beams, vocabulary).

        Returns the beam that each new continuation extends.
        """
        width, stop_tokens = self._options.num_beams, self._options.stop_tokens
        totals = (self._totals[:, None] + log_probs).reshape(-1)
        num_candidates = max(2, 1 + len(stop_tokens)) * width  # enough even if some candidates end
        kept = []
        for rank, place in enumerate(np.argsort(-totals, kind="stable")[:num_candidates].tolist()):
            beam, token = divmod(place, log_probs.shape[1])
            text = [*self.texts[beam], token]
            if token not in stop_tokens:
                kept.append((beam, totals[place], text))
            elif rank < width and not self.is_done:
                self._ended.append((self._score(totals[place], text), text))
        while len(kept) < width:  # the vocabulary is smaller than the number of beams
            kept.append((kept[-1][0], -np.inf, kept[-1][2]))
        del kept[width:]
        self.texts = [text for _, _, text in kept]
        self._totals = np.array([total for _, total, _ in kept])
        self._ended = sorted(self._ended, key=_score_of, reverse=True)[:width]
        if (
            len(self._ended) == width
            and self._score(self._totals.max(), self.texts[0]) <= self._ended[-1][0]
        ):
            self.is_done = True
        return [beam for beam, _, _ in kept]

    def best(self) -> list[int]:
        """Return the most likely continuation, ended or not."""
        open_ = (
            []
            if self.is_done
            else [(self._score(t, text), text) for t, text in zip(self._totals, self.texts)]
        )
        return max([*self._ended, *open_], key=_score_of)[1]

    def _score(self, total: float, text: list[int]) -> float:
        return float(total / len(text) ** self._options.length_penalty)


def _score_of(pair: tuple[float, list[int]]) -> float:
    return pair[0]


def _generators(prompts: Sequence[Sequence[int]], seed: int) -> list[np.random.Generator]:
    """Return one generator per row, seeded by `seed` and the row's prompt.

    Equal prompts get different generators.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for prompt in map(tuple, prompts):
        found.append(np.random.default_rng([seed, seen[prompt], *prompt]))
        seen[prompt] += 1
    return found


def _choose(scores: np.ndarray, options: GenerationOptions, random: np.random.Generator) -> int:
    """Choose the next token of one row."""
    if options.temperature == 0:
        return int(scores.argmax())
    order = np.argsort(-scores, kind="stable")[: options.top_k or None]
    probabilities = np.exp(_log_softmax(scores[order].astype(np.float64) / options.temperature))
    before = np.cumsum(probabilities) - probabilities
    probabilities = np.where(before < options.top_p, probabilities, 0.0)
    return int(order[random.choice(len(order), p=probabilities / probabilities.sum())])


def _log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores.astype(np.float64) - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _until_stop(tokens: list[int], stop_tokens: Sequence[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_tokens), None)
    return tokens[:end]
