"""Model families as plain modules: no parallel code and no config object inside, a plan as data beside each."""

from libai.models.mlp import MLP, MLP_PLAN
from libai.models.text.bert import BERT, BERT_PLAN, BERTClassifier, BERTEmbedder
from libai.models.text.gpt import GPT, GPT_PLAN
from libai.models.text.llama import LLAMA_PLAN, Llama
from libai.models.text.t5 import T5, T5_ENCODER_PLAN, T5_PLAN, T5Encoder
from libai.models.vision.resmlp import RESMLP_PLAN, ResMLP
from libai.models.vision.resnet import RESNET_PLAN, ResNet
from libai.models.vision.swin import SWIN_PLAN, SWINV2_PLAN, Swin, SwinV2
from libai.models.vision.vit import VIT_PLAN, ViT
