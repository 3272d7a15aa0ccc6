"""Language-model data on every machine: the source text of the Python standard library, as bytes
(vocab_size 257).

For byte-pair tokens, set `dataloader.train.dataset.tokenizer=bpe
dataloader.train.dataset.vocab_size=4096` and the same vocab_size for the model. Validation takes
its options from training, so that both read the same prepared folder.
"""

from omegaconf import OmegaConf

from libai.config import LazyCall
from libai.data import build_eval_loader, build_stdlib_dataset, build_train_loader

_TRAIN = "${....train.dataset"

dataloader = OmegaConf.create(
    {
        "train": LazyCall(build_train_loader)(
            dataset=LazyCall(build_stdlib_dataset)(
                split="train",
                sequence_length=128,
                tokenizer="bytes",
                vocab_size=None,
                validation_fraction=0.05,
                cache_dir=None,
            ),
            prefetch=2,
            num_workers=0,
        ),
        "test": {
            "val": LazyCall(build_eval_loader)(
                dataset=LazyCall(build_stdlib_dataset)(
                    split="validation",
                    sequence_length=f"{_TRAIN}.sequence_length}}",
                    tokenizer=f"{_TRAIN}.tokenizer}}",
                    vocab_size=f"{_TRAIN}.vocab_size}}",
                    validation_fraction=f"{_TRAIN}.validation_fraction}}",
                    cache_dir=f"{_TRAIN}.cache_dir}}",
                ),
                # The whole split has about 9,000 windows, which take minutes on a CPU; null
                # evaluates all of them.
                max_batches=32,
            ),
        },
    }
)
