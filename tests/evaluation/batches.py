"""Evaluate a dataset that is split into batches."""

from libai.evaluation import add_sums


def evaluate(evaluator, batch, outputs, batch_size=None):
    """Return the metrics. `batch` and `outputs` are dicts of arrays with one row per sample."""
    count = len(next(iter(batch.values())))
    sums = {}
    for start in range(0, count, batch_size or count):
        rows = slice(start, start + (batch_size or count))
        part = {name: values[rows] for name, values in batch.items()}
        found = {name: values[rows] for name, values in outputs.items()}
        sums = add_sums(sums, evaluator.process(part, found))
    return evaluator.compute(sums)
