"""Model families as plain modules, without parallel code or config objects.

Their `plan` is the layout on a mesh.
"""

from libai.models.bert import BERT, BERTClassifier, BERTEmbedder
from libai.models.gpt import GPT
from libai.models.llama import Llama
from libai.models.mlp import MLP
from libai.models.resmlp import ResMLP
from libai.models.resnet import ResNet
from libai.models.swin import Swin, SwinV2
from libai.models.t5 import T5, T5Encoder
from libai.models.vit import ViT
