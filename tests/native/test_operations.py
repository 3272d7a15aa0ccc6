"""Values and gradients of every operation with a libai kernel, compared with OneFlow in float64."""

import functools
from types import SimpleNamespace

import numpy as np
import oneflow as flow
import pytest
from native_reference import EPS, close, compare, random, results
from numpy.testing import assert_allclose, assert_array_equal
from oneflow import nn
from oneflow.nn import functional as F

from libai.native.operations import apply_to_many, build_operation


def where(*mask_shape):
    return lambda x, y: flow.where(flow.tensor(random(*mask_shape, seed=2) > 0), x, y)


def filled(*mask_shape):
    return lambda x: x.masked_fill(flow.tensor(random(*mask_shape, seed=2) > 0), -3.0)


def power(exponent):
    return lambda x: (x * x + 0.1) ** exponent


def layer_norm(*normalized):
    return lambda x, weight=None, bias=None: F.layer_norm(x, normalized, weight, bias)


def group_norm(groups, kind=nn.GroupNorm):
    """With weights as arguments. An instance norm has a group for each channel."""

    def function(x, weight=None, bias=None):
        names = dict.fromkeys(("num_channels", "num_features"), x.shape[1])
        norm = SimpleNamespace(**names, num_groups=groups, eps=1e-5, weight=weight, bias=bias)
        norm._forward = functools.partial(nn.InstanceNorm1d._forward, norm)
        norm._check_input_dim = lambda x: None
        return kind.forward(norm, x)

    return function


def batch_norm(is_training):
    def function(x, weight, bias):
        mean, variance = (
            flow.tensor(abs(random(x.shape[1], seed=seed)) + 0.5, dtype=x.dtype) for seed in (5, 6)
        )
        return flow._C.normalization(x, mean, variance, weight, bias, 1, 1e-5, 0.9, is_training)

    return function


def bias_add(axis):
    return lambda x, bias: flow._C.bias_add(x, bias, axis=axis)


def resized(mode, **options):
    return lambda x: F.interpolate(x, mode=mode, **options)


def conv(*settings, function=F.conv2d):
    return lambda x, weight, bias: function(x, weight, bias, *settings)


def matmul(transposes="", alpha=1.0):
    return lambda a, b: flow._C.matmul(a, b, "a" in transposes, "b" in transposes, alpha)


def reduced(kind, axes, keepdim=False):
    return lambda x: getattr(x, kind)(axes, keepdim)


POINTWISE = {
    "gelu": flow._C.gelu,
    "fast_gelu": flow._C.fast_gelu,
    "quick_gelu": flow._C.quick_gelu,
    "silu": F.silu,
    "sigmoid": flow.sigmoid,
    "tanh": flow.tanh,
    "exp": flow.exp,
    "erf": flow.erf,
}
SCALE, SELU = 1.0507009873554805, 1.6732632423543772


def expm1(x):
    return np.expm1(np.minimum(x, 0))


def exp(x):
    return np.exp(np.minimum(x, 0))


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def mish_slope(x):
    gate = np.tanh(np.logaddexp(0, x))
    return gate + x * (1 - gate**2) * sigmoid(x)


#: function, value and slope in NumPy: OneFlow's own are inexact near 0 and far out
CURVES = {
    "softplus": (
        lambda x: F.softplus(x, 1.5, 12.0),
        lambda x: np.where(1.5 * x > 12, x, np.logaddexp(0, 1.5 * x) / 1.5),
        lambda x: np.where(1.5 * x > 12, 1, sigmoid(1.5 * x)),
    ),
    "elu": (
        lambda x: F.elu(x, 1.3),
        lambda x: np.where(x > 0, x, 1.3 * expm1(x)),
        lambda x: np.where(x > 0, 1, 1.3 * exp(x)),
    ),
    "celu": (
        lambda x: F.celu(x, alpha=1.7),
        lambda x: np.where(x > 0, x, 1.7 * expm1(x / 1.7)),
        lambda x: np.where(x > 0, 1, exp(x / 1.7)),
    ),
    "selu": (
        F.selu,
        lambda x: SCALE * np.where(x > 0, x, SELU * expm1(x)),
        lambda x: SCALE * np.where(x > 0, 1, SELU * exp(x)),
    ),
    "mish": (F.mish, lambda x: x * np.tanh(np.logaddexp(0, x)), mish_slope),
    "log_sigmoid": (F.logsigmoid, lambda x: -np.logaddexp(0, -x), lambda x: sigmoid(-x)),
    "hardswish": (
        F.hardswish,
        lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
        lambda x: np.where(x <= -3, 0, np.where(x >= 3, 1, x / 3 + 0.5)),
    ),
    "hardsigmoid": (
        F.hardsigmoid,
        lambda x: np.clip(x / 6 + 0.5, 0, 1),
        lambda x: np.where(abs(x) < 3, 1 / 6, 0),
    ),
}

FUNCTIONS = {**POINTWISE, **{name: function for name, (function, *_) in CURVES.items()}}
_POOL, _IMAGE = "avg_pool_2d avg_pool_2d_grad", (2, 3, 9, 8)
_BILINEAR = "upsample_bilinear_2d upsample_bilinear_2d_grad"
_ADAPTIVE = "adaptive_avg_pool2d adaptive_avg_pool2d_grad"
_CONV = "conv2d conv_data_grad conv_filter_grad bias_add"
_LAYER_NORM = "layer_norm layer_norm_grad"
_BATCH_NORM = "normalization normalization_grad"
#: operations that must run, function, shapes of its inputs
CASES = [
    *((f"{name} {name}_grad", function, (33, 1027)) for name, function in FUNCTIONS.items()),
    ("leaky_relu leaky_relu_grad", lambda x: F.leaky_relu(x, 0.1), (5, 33)),
    *(("scalar_pow scalar_pow_grad", power(exponent), (9, 33)) for exponent in (2, 3.0, -0.5)),
    ("sqrt sqrt_grad", lambda x: flow.sqrt(x * x + 0.1), (9, 33)),
    ("rsqrt rsqrt_grad", lambda x: flow.rsqrt(x * x + 0.1), (9, 33)),
    *(
        ("where", where(*mask), (4, 5, 33), (4, 5, 33))
        for mask in ((4, 5, 33), (4, 1, 33), (4, 5, 1))
    ),
    ("masked_fill", filled(4, 5, 1), (4, 5, 33)),
    *(
        ("softmax softmax_grad", lambda x: flow.softmax(x, -1), shape)
        for shape in ((3, 1), (70, 1000))
    ),
    ("softmax softmax_grad", lambda x: flow.softmax(x, 1), (5, 6, 7)),
    ("log_softmax log_softmax_grad", lambda x: flow.log_softmax(x, -1), (35, 23)),
    (f"{_LAYER_NORM} layer_norm_param_grad", layer_norm(384), (2, 9, 384), (384,), (384,)),
    (f"{_LAYER_NORM} layer_norm_param_grad", layer_norm(5, 6), (3, 4, 5, 6), (5, 6), (5, 6)),
    (_LAYER_NORM, layer_norm(40), (6, 40)),
    # with one and with many contiguous numbers per channel
    *(
        (_BATCH_NORM, batch_norm(True), shape, shape[1:2], shape[1:2])
        for shape in ((600, 7), (3, 2, 4, 5, 6))
    ),
    ("normalization", batch_norm(False), (8, 4, 6, 7), (4,), (4,)),
    (_LAYER_NORM, group_norm(3), (4, 6, 5, 7), (6,), (6,)),
    (_LAYER_NORM, group_norm(2), (4, 6, 9)),
    (_LAYER_NORM, group_norm(0, nn.InstanceNorm2d), (4, 6, 5, 7), (6,), (6,)),
    ("bias_add", bias_add(2), (3, 4, 5), (5,)),
    # one input channel for each output channel
    (_CONV, conv(1, 1, 1, 6), (3, 6, 9, 8), (6, 1, 3, 3), (6,)),
    (_CONV, conv(2, 3, 2, 5), (2, 5, 17, 12), (10, 1, 4, 3), (10,)),
    (_CONV, conv(1, 3, 1, 4), (2, 4, 90, 70), (4, 1, 7, 7), (4,)),
    ("conv1d", conv(1, 2, 1, 8, function=F.conv1d), (3, 8, 40), (8, 1, 5), (8,)),
    ("conv3d", conv(2, 1, 1, 3, function=F.conv3d), (2, 3, 5, 6, 7), (3, 1, 3, 2, 3), (3,)),
    (_CONV, conv(1, 1, 1, 1), (3, 5, 9, 7), (6, 5, 3, 3), (6,)),
    (_CONV, conv(3, 2, 2, 1), (2, 3, 11, 11), (33, 3, 5, 5), (33,)),
    (
        _CONV,
        conv(1, 1, 1, 1),
        (70, 8, 2, 2),
        (8, 8, 3, 3),
        (8,),
    ),  # more samples than are computed at a time
    (
        _CONV,
        conv(1, 1, 1, 1),
        (3, 300, 4, 4),
        (20, 300, 3, 3),
        (20,),
    ),  # more channels than are summed at a time
    (
        _CONV,
        conv(1, 1, 1, 1),
        (5, 64, 1, 1),
        (32, 64, 3, 3),
        (32,),
    ),  # eight of nine taps read no input
    (
        _CONV,
        conv(2, 0, 1, 1),
        (2, 16, 7, 7),
        (16, 16, 1, 1),
        (16,),
    ),  # three of four inputs are read by no output
    (_CONV, conv(2, 1, 1, 4), (2, 8, 5, 5), (8, 2, 3, 3), (8,)),
    ("conv3d", conv(1, 1, 1, 1, function=F.conv3d), (2, 3, 5, 6, 7), (4, 3, 2, 3, 2), (4,)),
    ("matmul", matmul(), (5, 7), (7, 9)),  # left to OpenBLAS: starting our kernel would take longer
    ("matmul", matmul(alpha=-0.5), (33, 48), (48, 32)),
    ("matmul", matmul("a"), (96, 257), (96, 384)),
    (
        "matmul",
        matmul("b"),
        (100, 1601),
        (45, 1601),
    ),  # no block size divides the rows, terms and columns
    ("matmul", matmul("b"), (1, 577), (900, 577)),  # few rows
    ("batch_matmul", matmul("b"), (2, 3, 33, 32), (2, 3, 40, 32)),
    ("broadcast_matmul", matmul(), (2, 1, 50, 60), (3, 60, 12)),
    ("broadcast_matmul broadcast_matmul_grad_b", matmul("b"), (5, 40, 48), (96, 48)),
    ("fused_matmul_bias broadcast_matmul_grad_b", F.linear, (5, 40, 48), (96, 48), (96,)),
    ("pad", lambda x: F.pad(x, (1, 2, 3, 4), value=1.5), _IMAGE),
    ("pad", lambda x: F.pad(x, (-1, 2, -3, 0)), _IMAGE),
    ("slice_grad", lambda x: x[:, 1:3, ::2, 5:] * 2, _IMAGE),
    ("flip", lambda x: flow.flip(x, (1, -1)), _IMAGE),
    ("roll", lambda x: x.roll((3, -20), (1, -1)), _IMAGE),
    ("roll", lambda x: x.roll(5), _IMAGE),
    *(
        ("concat split_like", lambda x, y, axis=axis: flow.cat([x, y, x], axis), _IMAGE, _IMAGE)
        for axis in (0, 1, -1)
    ),
    # the first and the last axis change places
    ("to_contiguous", lambda x: x.permute(0, 3, 2, 1) * 2, (2, 21, 5, 18)),
    (_POOL, nn.AvgPool2d(3, 2, 1, count_include_pad=False), _IMAGE),
    *((_ADAPTIVE, nn.AdaptiveAvgPool2d(size), _IMAGE) for size in ((1, 1), (12, 4))),
    *(("reduce_sum", reduced("sum", axes), (5, 7, 9)) for axes in ((0,), (-1,), (0, 2))),
    *(
        (_BILINEAR, resized("bilinear", **options), _IMAGE)
        for options in (
            {"scale_factor": 2.0},
            {"size": (4, 13)},
            {"size": (17, 3), "align_corners": True},
        )
    ),
    *(
        (_BILINEAR.replace("bilinear", "nearest"), resized("nearest", **options), _IMAGE)
        for options in ({"scale_factor": 2.3}, {"size": (4, 13)})
    ),
    ("reduce_sum", reduced("sum", (0, 1), True), (40, 3, 300)),
    ("reduce_sum_like", flow.mul, (5, 7, 9), (7, 1)),
    *(("broadcast_like", reduced("mean", axes), (5, 7, 9)) for axes in ((0,), (-1,), (0, 2))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].split()[0]}-{case[2]}")
def test_values_and_gradients_are_those_of_float64(level, counted, case):
    ops, function, *shapes = case
    arrays = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    # a convolution in float32 is rounded once for each of its many terms
    spread = max(1.0, np.sqrt(arrays[1][0].size) / 8) if ops == _CONV else 1.0
    compare(function, *arrays, spread=spread)
    counted(*ops.split())


def test_a_wrong_result_is_noticed(library):
    with pytest.raises(AssertionError, match="Mismatched"):
        compare(lambda x: x.exp() * (1.0 if x.dtype == flow.float64 else 1.0 + 1e-5), random(5, 7))


FAR = [
    -1e30,
    -200,
    -103,
    -90,
    -20,
    -14,
    -13,
    -1e-3,
    -1e-30,
    -0.0,
    0.0,
    1e-30,
    1e-3,
    13,
    14,
    20,
    88,
    100,
    200,
    1e30,
]


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", POINTWISE)
def test_functions_far_out_and_near_zero(level, name):
    x = np.float32(FAR)
    found = results(POINTWISE[name], [x], np.float32)
    expected = [array.astype(np.float32) for array in results(POINTWISE[name], [x], np.float64)]
    near = np.abs(x) < 1e-2
    assert_allclose(found[0][near], expected[0][near], rtol=8 * EPS, atol=1e-37)
    for ours, theirs in zip(found, expected):
        assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CURVES)
def test_curves_follow_their_formulas_everywhere(level, name):
    function, value, slope = CURVES[name]
    x = np.float32([*FAR, *np.linspace(-25, 25, 301)])
    found = results(function, [x], np.float32)
    wide = x.astype(np.float64)
    # the product 1.5 * 25 is rounded, and exp makes a relative error of an absolute one
    assert_allclose(found[0], value(wide), rtol=4e-6, atol=1e-37)
    factors = random(*x.shape, seed=99)
    assert_allclose(found[1], slope(wide) * factors, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays_nan_and_float64_stays_oneflows(level, library, name):
    tensor = flow.tensor([np.nan, 1.0], requires_grad=True)
    found = FUNCTIONS[name](tensor)
    found.sum().backward()
    for values in (found, tensor.grad):
        assert np.isnan(values.numpy()).tolist() == [True, False]
    before = library.calls()[name]
    FUNCTIONS[name](tensor.to(flow.float64))
    assert library.calls()[name] == before


def test_infinities_and_zeros_have_limits(level):
    ends = flow.tensor([np.inf, -np.inf, 0.0])
    for function in POINTWISE.values():
        wide = function(ends.to(flow.float64)).numpy()
        assert_array_equal(function(ends).numpy(), wide.astype(np.float32))
    assert flow.sqrt(ends.abs()).numpy().tolist() == [np.inf, np.inf, 0.0]
    assert (
        np.isnan(flow.sqrt(flow.tensor([-1.0])).numpy()).all()
        and np.isinf(flow.rsqrt(flow.zeros(1)).numpy()).all()
    )
    x = flow.tensor([-2.0, -0.0, 3.0], requires_grad=True)
    (x**3).sum().backward()
    assert x.grad.numpy().tolist() == [12.0, 0.0, 27.0]


def test_masked_scores_have_no_weight(level):
    x = flow.tensor([[0.0, -1e9, 1.0, -np.inf], [1e38, -1e38, 0.0, 3e38]])
    found = flow.softmax(x, -1).numpy()
    assert found[0, 1] == found[0, 3] == 0.0
    close(found, np.array([[1 / (1 + np.e), 0, np.e / (1 + np.e), 0], [0, 0, 0, 1]]))
    assert np.isnan(
        flow.softmax(flow.tensor([[-np.inf, -np.inf], [np.nan, 0.0], [0.0, np.nan]]), -1).numpy()
    ).all()


COMPARISONS = {
    "equal": flow.eq,
    "not_equal": flow.ne,
    "less": flow.lt,
    "less_equal": flow.le,
    "greater": flow.gt,
    "greater_equal": flow.ge,
}
OPERATORS = {
    **COMPARISONS,
    "add": flow.add,
    "subtract": flow.sub,
    "multiply": flow.mul,
    "divide": flow.div,
}
PAIRS = [
    ((4, 5, 6), (5, 1)),
    ((2, 1, 3, 1, 5), (1, 4, 1, 6, 1)),
    ((0, 3), (1, 3)),
]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_numpys_bit_for_bit(level, counted, name):
    operation, expected = OPERATORS[name], getattr(np, name)
    for left, right in PAIRS:
        # whole numbers, some of them equal, and none of them zero
        x, y = (np.round(random(*shape, seed=len(shape))) + 20 for shape in (left, right))
        x[..., :1] = np.nan
        for one, other in ((x, y), (y, x), (x, x)):
            found = operation(flow.tensor(one), flow.tensor(other))
            assert_array_equal(found.numpy(), expected(one, other))
    if name in COMPARISONS:
        assert found.dtype == flow.bool
        assert_array_equal(operation(flow.tensor(y), 20.0).numpy(), expected(y, 20.0))
        counted(f"broadcast_{name}", f"scalar_logical_{name}")


@pytest.mark.parametrize("count", [2, 5])
def test_a_sum_of_tensors_is_numpys_bit_for_bit(level, counted, count):
    terms = [random(13, 7, seed=seed) for seed in range(count)]
    expected = sum(terms[1:], start=terms[0])
    assert_array_equal(flow._C.add([flow.tensor(term) for term in terms]).numpy(), expected)
    tensor = flow.tensor(terms[0])
    for term in terms[1:]:
        tensor += flow.tensor(term)
    assert_array_equal(tensor.numpy(), expected)
    counted("add_n")


def test_long_sums_and_large_means_keep_their_digits(level):
    x = np.random.default_rng(0).random(3_000_000, dtype=np.float32)
    assert float(flow.tensor(x).sum().numpy()) == pytest.approx(
        x.astype(np.float64).sum(), rel=4 * EPS
    )
    for norm, shape, axis in ((nn.LayerNorm(256), (5, 256), 1), (nn.BatchNorm1d(3), (50, 3), 0)):
        x = random(*shape) + np.float32(1e4)
        wide = x.astype(np.float64)
        expected = (wide - wide.mean(axis, keepdims=True)) / np.sqrt(
            wide.var(axis, keepdims=True) + 1e-5
        )
        assert_allclose(norm(flow.tensor(x)).detach().numpy(), expected, atol=1e-3)


def test_copies_of_views_are_numpys(level, counted):
    x = random(3, 4, 5, 6, 33)
    for order in ((4, 3, 2, 1, 0), (0, 2, 1, 3, 4), (3, 4, 0, 1, 2), (1, 0, 4, 2, 3)):
        found = flow.tensor(x)[:, 1:3, ::2, 2:, 1:].permute(*order).contiguous()
        assert_array_equal(found.numpy(), x[:, 1:3, ::2, 2:, 1:].transpose(order))
        found = flow.tensor(x[:, :1]).expand(3, 4, 5, 6, 33).permute(*order).contiguous()
        assert_array_equal(found.numpy(), np.broadcast_to(x[:, :1], x.shape).transpose(order))
    for width in (3, 7, 12, 25, 300):  # widths of rows that are copied whole
        x = random(5, 6, width)
        assert_array_equal(
            flow.tensor(x).transpose(0, 1).contiguous().numpy(), x.transpose(1, 0, 2)
        )
    counted("to_contiguous")


def test_views_are_computed_as_their_copies(library):
    x = flow.tensor(random(9, 8, 5, 3)).permute(3, 2, 1, 0)
    convolution, sequences = nn.Conv2d(5, 6, 3, padding=1), x[0]
    functions = [
        *POINTWISE.values(),
        lambda t: flow.softmax(t, 1),
        nn.LayerNorm(9),
        nn.MaxPool2d(2),
        convolution,
    ]
    for function, view in (
        *((function, x) for function in functions),
        (nn.MaxPool1d(3, 2, 1), sequences),
    ):
        assert_array_equal(function(view).numpy(), function(view.contiguous()).numpy())


def test_nothing_gives_nothing(library):
    nothing = flow.zeros(0, 3, 4, 4)
    layers = [
        nn.Conv2d(3, 6, 3, padding=1),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.Softmax(-1),
        nn.LayerNorm(4),
    ]
    shapes = [tuple(layer(nothing).shape) for layer in layers]
    assert shapes == [(0, 6, 4, 4), (0, 3, 2, 2), (0, 3, 2, 2), (0, 3, 4, 4), (0, 3, 4, 4)]
    assert flow.zeros(0, 3).transpose(0, 1).contiguous().shape == (3, 0)
    for a, b in (((0, 6), (6, 9)), ((5, 0), (0, 9)), ((3, 0, 6), (3, 6, 9))):
        found = flow.matmul(flow.zeros(*a), flow.zeros(*b)).numpy()
        assert_array_equal(found, np.zeros((*a[:-1], 9), np.float32))


def test_nan_and_inf_reach_what_sees_them_and_nothing_else(level):
    x = np.zeros((1, 1, 5, 5), np.float32)
    x[0, 0, 0, 0], x[0, 0, 4, 4] = np.nan, np.inf
    found = F.conv2d(flow.tensor(x), flow.ones(1, 1, 3, 3), padding=1).numpy()[0, 0]
    assert np.isnan(found[:2, :2]).all() and np.isinf(found[3:, 3:]).all()
    assert (found[2, 2], np.isfinite(found).sum()) == (0.0, 25 - 8)
    a, b = random(40, 40), random(40, 40, seed=1)
    a[3, 7], b[5, 39] = np.nan, np.inf
    found, expected = flow.matmul(flow.tensor(a), flow.tensor(b)).numpy(), a.astype(np.float64) @ b
    assert_array_equal(np.isnan(found), np.isnan(expected))
    assert_array_equal(np.isinf(found), np.isinf(expected))


def test_what_a_kernel_cannot_do_stays_oneflows(library):
    """Such inputs are channels last, and norms with one frozen parameter, in float64 or of a wrong
    shape.
    """
    before = library.calls()
    x, w = random(2, 5, 5, 3), random(4, 3, 3, 3, seed=2)
    assert flow._C.conv2d(flow.tensor(x), flow.tensor(w), channel_pos="channels_last").shape == (
        2,
        3,
        3,
        4,
    )
    norm, x = nn.LayerNorm(8), flow.tensor(random(3, 8), requires_grad=True)
    norm.weight.requires_grad_(False)
    norm(x).sum().backward()
    assert norm.bias.grad is not None and x.grad is not None
    assert nn.LayerNorm(8).to(flow.float64)(x.detach().to(flow.float64)).dtype == flow.float64
    with pytest.raises(RuntimeError, match="expected input with shape"):
        nn.LayerNorm(8)(flow.zeros(3, 9))
    after = library.calls()
    assert [after[op] - before[op] for op in ("conv2d", "layer_norm")] == [0, 0]


@pytest.mark.parametrize(
    "settings", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.3}], ids=str
)
def test_batch_norm_is_oneflows_with_every_setting(library, counted, stock, settings):
    def run():
        norm = nn.BatchNorm1d(5, **settings)
        buffers = [tensor for tensor in (norm.running_mean, norm.running_var) if tensor is not None]
        return [
            *results(norm, [random(6, 5, 9)], np.float32),
            *(tensor.numpy() for tensor in buffers),
        ]

    ours, expected = run(), stock(run)
    assert len(ours) == len(expected)
    for found, wanted in zip(ours, expected):
        close(found, wanted)
    counted("normalization", "normalization_grad")


#: shape, kernel, stride, padding, dilation, ceil mode
POOLS = [
    ((3, 5, 9, 11), (3, 2), (2, 1), (1, 0), 1, False),
    ((2, 3, 7, 7), 3, 2, 1, 1, True),
    ((1, 1, 1, 1), 1, 1, 0, 1, False),
]


@pytest.mark.parametrize("case", POOLS, ids=str)
def test_maxima_are_oneflows_with_their_places_bit_for_bit(library, counted, stock, case):
    shape, kernel, stride, padding, dilation, ceil_mode = case
    x = np.round(random(*shape) * 4) / 4  # rounded to make some numbers equal
    x.reshape(-1)[::17] = np.nan
    pool = nn.MaxPool2d(kernel, stride, padding, dilation, return_indices=True, ceil_mode=ceil_mode)

    def run():
        return [pool(flow.tensor(x))[1].numpy(), *results(lambda t: pool(t)[0], [x], np.float32)]

    for found, expected in zip(run(), stock(run)):
        assert_array_equal(found, expected)
    counted("max_pool_2d", "max_pool_2d_grad")


def test_layer_norm_has_gradients_of_gradients(library, counted):
    """The gradients of the sum of all squared gradients equal those that OneFlow computes in
    float64.
    """

    def penalties(norm, x):
        x = x.requires_grad_()
        parameters = list(norm.parameters())
        out = norm(x)
        first = flow.autograd.grad((out * out * out).sum(), [x, *parameters], create_graph=True)
        second = flow.autograd.grad(sum((g * g).sum() for g in first), [x, *parameters])
        return [[g.numpy() for g in grads] for grads in (first, second)]

    norm = nn.LayerNorm((4, 5), eps=1e-2)
    for parameter, seed in zip(norm.parameters(), (5, 6)):
        parameter.data.copy_(flow.tensor(random(4, 5, seed=seed, spread=0.5)))
    x = flow.tensor(random(2, 3, 4, 5, spread=1.0))
    found = penalties(norm, x)
    counted("layer_norm_grad")
    expected = penalties(norm.to(flow.float64), x.detach().to(flow.float64))
    for order, tolerance in enumerate((1e-5, 1e-4)):  # errors grow from order to order
        for f, e in zip(found[order], expected[order]):
            assert_allclose(f, e, rtol=0, atol=tolerance * np.abs(e).max())


@pytest.mark.parametrize("shape", [(3, 700, 64), (300, 600, 48), (1100, 1000, 1000), (5, 3, 7)])
def test_a_product_scales_its_result_and_adds_to_it_as_operations_of_their_own_do(
    shape, level, library, counted
):
    rows, terms, columns = shape
    sizes = [(rows, terms), (columns, terms), (columns,), (rows, columns)]
    x, weight, bias, more = (flow.tensor(random(*size, seed=i)) for i, size in enumerate(sizes))
    names = tuple((name, 1) for name in ("x", "weight", "bias", "_add_to_output"))

    def linear(*inputs):
        return apply_to_many(
            build_operation("fused_matmul_bias", names[: len(inputs)], "out"), inputs
        )

    product = linear(x, weight, flow.zeros(columns))
    assert_allclose(product, x.numpy() @ weight.numpy().T, rtol=1e-4, atol=1e-3)
    assert_array_equal(matmul("b", 0.3)(x, weight).numpy(), (product * 0.3).numpy())
    assert_array_equal(linear(x, weight, bias).numpy(), (product + bias).numpy())
    assert_array_equal(linear(x, weight, bias, more).numpy(), (product + bias + more).numpy())
    counted("fused_matmul_bias")
