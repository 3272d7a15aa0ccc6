// Replaces a header that the wheel lacks. Only the name is needed.
#pragma once

namespace oneflow {
class LocalDepObject;
}  // namespace oneflow
