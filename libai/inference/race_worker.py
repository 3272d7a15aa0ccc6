"""Generates with one library for `libai benchmark generate`: python race_worker.py FOLDER libai|transformers.

Reads JSON lines `[rows, prompt length, new tokens]` and answers `[seconds, processor seconds, tokens of the first row]`
of the steps behind the first token. Runs in an environment with libai or with transformers.
"""

import json
import sys
import time


class Clock:
    """Notes when tokens come; a streamer of transformers."""

    def __init__(self):
        self.tokens, self.times = [], []

    def put(self, tokens):
        """The next token of every row; at first the prompt."""
        self.tokens.append(int(tokens.reshape(-1)[0]))
        self.times.append((time.perf_counter(), time.process_time()))

    def end(self):
        """Nothing more comes."""


def load_libai(folder):
    """`generate(prompts, new tokens, clock)` of libai."""
    from libai.hf import load_pretrained
    from libai.inference import GenerationOptions, Generator

    generator = Generator(load_pretrained(folder))

    def generate(prompts, count, clock):
        for tokens in generator.stream(prompts, GenerationOptions(count)):
            clock.put(tokens)

    return generate


def load_transformers(folder):
    """The same of transformers, in float32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(prompts, count, clock):
        ids = torch.tensor(prompts)
        options = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids), "streamer": clock}
        model.generate(ids, min_new_tokens=count, max_new_tokens=count, **options)
        del clock.tokens[0], clock.times[0]  # the prompt

    return generate


def main():
    """Answer until the input ends."""
    generate = (load_libai if sys.argv[2] == "libai" else load_transformers)(sys.argv[1])
    print("ready", flush=True)
    for line in sys.stdin:
        rows, length, count = json.loads(line)
        clock = Clock()
        generate([[i % 50 for i in range(length)]] * rows, count, clock)
        wall, work = (end - start for start, end in zip(clock.times[0], clock.times[-1]))
        print(json.dumps([wall, work, clock.tokens]), flush=True)


if __name__ == "__main__":
    main()
