"""Recurrent and attention models of the zoo, as their users would write them."""

import oneflow as flow
import oneflow.nn.functional as F
from oneflow import nn


class LSTMClassifier(nn.Module):
    """Two layers, batch first; the last time step decides."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 4)

    def forward(self, steps, y):
        out, _ = self.rnn(steps)
        return {"losses": {"cls": F.cross_entropy(self.head(out[:, -1]), y)}}


class UnrolledLSTM(nn.Module):
    """A cell in a Python loop; its initial state is made from the input."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(6, 12)
        self.start = nn.Linear(6, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, steps, y):
        hidden = flow.tanh(self.start(steps[:, 0]))
        memory = hidden * 0.5
        for t in range(steps.shape[1]):
            hidden, memory = self.cell(steps[:, t], (hidden, memory))
        return {"losses": {"cls": F.cross_entropy(self.head(hidden), y)}}


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, memory):
        scores = flow.matmul(self.query(x), self.key(memory).transpose(1, 2)) * 0.25
        return self.out(flow.matmul(F.softmax(scores, dim=-1), self.value(memory)))


class Translator(nn.Module):
    """Encoder and decoder of token ids with cross attention, and a loss over the labels that are
    not ignored.
    """

    plan = {
        "split": {
            "*.query.*": 0,
            "*.key.*": 0,
            "*.value.*": 0,
            "*.out.weight": 1,
        }
    }

    def __init__(self, width=16, vocab=20):
        super().__init__()
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encode, self.attend = CrossAttention(width), CrossAttention(width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, source, target, labels):
        memory = self.source(source)
        memory = self.norm1(memory + self.encode(memory, memory))
        x = self.target(target)
        x = self.norm2(x + self.attend(x, memory))
        logits = self.head(x).reshape(-1, 20)
        return {"losses": {"token": F.cross_entropy(logits, labels.reshape(-1), ignore_index=-100)}}

    def num_loss_items(self, source, target, labels):
        return (labels != -100).sum()


MODELS = {
    "lstm": (LSTMClassifier, "sequences"),
    "lstm_cell_loop": (UnrolledLSTM, "sequences"),
    "translator": (Translator, "translations"),
}
