"""Configuration: lazy configs in Python files, overrides, and a typed schema that catches mistakes early.

Importing this package does not import oneflow; a config file may.
"""

from libai.config.arguments import Args as Args
from libai.config.arguments import parse_args as parse_args
from libai.config.batch import BatchSizes as BatchSizes
from libai.config.batch import batch_sizes_of as batch_sizes_of
from libai.config.batch import solve_batch_sizes as solve_batch_sizes
from libai.config.batch import solve_data_parallel_size as solve_data_parallel_size
from libai.config.lazy.instantiation import fill_unset as fill_unset
from libai.config.lazy.instantiation import instantiate as instantiate
from libai.config.lazy.instantiation import locate as locate
from libai.config.lazy.instantiation import target_of as target_of
from libai.config.lazy.lazy_config import LazyCall as LazyCall
from libai.config.lazy.lazy_config import LazyConfig as LazyConfig
from libai.config.lazy.lazy_config import get_config as get_config
from libai.config.lazy.overrides import format_override as format_override
from libai.config.settings import schema as schema
from libai.config.settings.errors import ConfigError as ConfigError
from libai.config.settings.schema import defaults as defaults
from libai.config.validation import RunConfig as RunConfig
from libai.config.validation import load_config as load_config
from libai.config.validation import validate as validate
