"""A variant of a few lines that sleeps instead of training: `sleeper.py [--seconds S] [--loss X] [--fail WHEN] ...`.

What a test plants is in its arguments; those that the controller appends (config, overrides) are ignored.
"""

import argparse
import sys
import time

from libai.benchmark.protocol import Unavailable, Variant, resources_of_this_process, serve_stdio


class Sleeper(Variant):
    def __init__(self, seconds, first_seconds, loss, fail):
        if fail == "unavailable":
            raise Unavailable("it cannot sleep here")
        self.seconds, self.first_seconds, self.loss, self.fail = seconds, first_seconds, loss, fail
        self.iteration = 0

    def facts(self):
        return {"mode": "sleeper", "processes": 1, "global_batch_size": given.batch, "flops_per_iter": 1000}

    def run(self, iterations, losses):
        if self.fail == "dies" and self.iteration:
            print("a planted death", file=sys.stderr)
            sys.exit(3)
        if self.fail == "hangs" and self.iteration:
            time.sleep(600)
        if self.fail == "talks":
            print("a library prints this", flush=True)
        before, start = time.process_time(), time.perf_counter()
        found = []
        for _ in range(iterations):
            time.sleep(self.first_seconds if self.iteration == 0 else self.seconds)
            self.iteration += 1
            found.append(self.loss / self.iteration * (1 + given.drift * 10**self.iteration))
        resources = resources_of_this_process()
        return {
            "seconds": time.perf_counter() - start,
            "losses": found if losses else [],
            "cpu_seconds": [before, resources["cpu_seconds"]],
            "peak_rss_bytes": resources["peak_rss_bytes"],
        }


parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=0.002)
parser.add_argument("--first-seconds", type=float, default=0.002)
parser.add_argument("--loss", type=float, default=5.0)
parser.add_argument("--fail", default="")
parser.add_argument("--drift", type=float, default=0.0)
parser.add_argument("--batch", type=int, default=4)
given, _ = parser.parse_known_args()
serve_stdio(lambda: Sleeper(given.seconds, given.first_seconds, given.loss, given.fail))
