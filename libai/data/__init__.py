"""Datasets, sample order and loaders; everything is NumPy, the engine makes the tensors.

A dataset is an object with `len(ds)` and `ds[i] -> dict`, or `ds.get_batch(indices) -> dict of arrays`; the keys are
arguments of `model.forward`. `build_train_loader` and `build_eval_loader` cut it over the ranks.
"""

from libai.data.loading.batches import InMemoryDataset as InMemoryDataset
from libai.data.loading.blending import BlendedDataset as BlendedDataset
from libai.data.loading.errors import DataError as DataError
from libai.data.loading.errors import SampleError as SampleError
from libai.data.loading.loaders import EvalLoader as EvalLoader
from libai.data.loading.loaders import TrainLoader as TrainLoader
from libai.data.loading.loaders import build_eval_loader as build_eval_loader
from libai.data.loading.loaders import build_train_loader as build_train_loader
from libai.data.loading.sampling import SampleRandom as SampleRandom
from libai.data.loading.sampling import SampleStream as SampleStream
from libai.data.loading.variable_length import PackedDataset as PackedDataset
from libai.data.loading.variable_length import PadCollate as PadCollate
from libai.data.text.megatron import MegatronDataset as MegatronDataset
from libai.data.text.prepare import build_stdlib_dataset as build_stdlib_dataset
from libai.data.text.prepare import build_text_dataset as build_text_dataset
from libai.data.text.prepare import prepare_stdlib_tokens as prepare_stdlib_tokens
from libai.data.text.prepare import prepare_tokens as prepare_tokens
from libai.data.text.preprocess import Preprocessed as Preprocessed
from libai.data.text.preprocess import preprocess as preprocess
from libai.data.text.samples import MaskedTokens as MaskedTokens
from libai.data.text.samples import SentenceOrder as SentenceOrder
from libai.data.text.span_corruption import SpanCorruption as SpanCorruption
from libai.data.text.token_files import verify_token_files as verify_token_files
from libai.data.text.tokenizers import BPETokenizer as BPETokenizer
from libai.data.text.tokenizers import ByteTokenizer as ByteTokenizer
from libai.data.text.tokenizers import load_tokenizer as load_tokenizer
from libai.data.text.windows import TokenDataset as TokenDataset
from libai.data.vision.files import ImageFolderDataset as ImageFolderDataset
from libai.data.vision.files import MnistDataset as MnistDataset
from libai.data.vision.images import CifarDataset as CifarDataset
from libai.data.vision.images import DigitsDataset as DigitsDataset
from libai.data.vision.mixing import MixedImages as MixedImages
