"""Datasets, sample order and loaders; everything is NumPy, the engine makes the tensors.

A dataset is an object with `len(ds)` and `ds[i] -> dict`, or `ds.get_batch(indices) -> dict of arrays`; the keys are
arguments of `model.forward`. `build_train_loader` and `build_eval_loader` cut it over the ranks.
"""

from libai.data.batches import InMemoryDataset as InMemoryDataset
from libai.data.errors import DataError as DataError
from libai.data.errors import SampleError as SampleError
from libai.data.images import CifarDataset as CifarDataset
from libai.data.images import DigitsDataset as DigitsDataset
from libai.data.loaders import EvalLoader as EvalLoader
from libai.data.loaders import TrainLoader as TrainLoader
from libai.data.loaders import build_eval_loader as build_eval_loader
from libai.data.loaders import build_train_loader as build_train_loader
from libai.data.sampling import SampleRandom as SampleRandom
from libai.data.sampling import SampleStream as SampleStream
from libai.data.text import build_stdlib_dataset as build_stdlib_dataset
from libai.data.text import build_text_dataset as build_text_dataset
from libai.data.text import prepare_stdlib_tokens as prepare_stdlib_tokens
from libai.data.text import prepare_tokens as prepare_tokens
from libai.data.token_files import TokenDataset as TokenDataset
from libai.data.token_files import verify_token_files as verify_token_files
from libai.data.tokenizers import BPETokenizer as BPETokenizer
from libai.data.tokenizers import ByteTokenizer as ByteTokenizer
from libai.data.tokenizers import load_tokenizer as load_tokenizer
from libai.data.variable_length import PackedDataset as PackedDataset
from libai.data.variable_length import PadCollate as PadCollate
