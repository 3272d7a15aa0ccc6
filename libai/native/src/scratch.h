// Memory that a thread keeps from one operation to the next.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "register.h"

namespace libai {

// Kept from call to call, unless it is much.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  // For `count` numbers, not set; valid until the next call.
  float* Get(int64_t count) {
    if (count > size_ || (size_ > kKept && count <= kKept)) {
      std::free(memory_);
      size_ = (count + 15) / 16 * 16;
      memory_ = static_cast<float*>(std::aligned_alloc(64, std::max<int64_t>(size_, 16) * sizeof(float)));
      CHECK(memory_ != nullptr) << "no memory for " << count << " numbers";
    }
    return memory_;
  }

 private:
  static constexpr int64_t kKept = 16 << 20;
  float* memory_ = nullptr;
  int64_t size_ = 0;
};
// Each `use` (0, 1 or 2) of a thread has memory of its own.
inline float* ScratchFor(int use, int64_t count) {
  thread_local Scratch scratch[3];
  return scratch[use].Get(count);
}

}  // namespace libai
