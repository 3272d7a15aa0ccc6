"""Model families as plain modules: no parallel code and no config object inside; a mesh reads their `plan`."""

from libai.models.custom_graph import CustomGraph
from libai.models.mlp import MLP
from libai.models.text.bert import BERT, BERTClassifier, BERTEmbedder
from libai.models.text.gpt import GPT
from libai.models.text.llama import Llama
from libai.models.text.t5 import T5, T5Encoder
from libai.models.vision.resmlp import ResMLP
from libai.models.vision.resnet import ResNet
from libai.models.vision.swin import Swin, SwinV2
from libai.models.vision.vit import ViT
