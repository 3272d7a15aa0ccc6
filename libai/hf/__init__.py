"""Import and export Hugging Face models without changing a byte of the weights, and compare them
with `transformers`.

Only JSON and raw numbers are read. docs/inference.md lists the supported architectures.
"""

from libai.hf.convert import (
    export_adapters,
    export_folder,
    import_folder,
    load_pretrained,
    model_config,
)
from libai.hf.files import read_folder
from libai.hf.verify import verify
