// As autograd/autograd_captured_tensor.h: only the names are needed.
#pragma once

namespace oneflow {
class LocalDepObject;
}  // namespace oneflow
