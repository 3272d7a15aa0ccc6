// Memory that a thread keeps from one operation to the next.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "register.h"

namespace libai {

// A buffer that is kept from call to call. A large one (over `kKept` numbers) is freed at the next small request.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  // Returns uninitialized memory for `count` numbers. It is valid until the next call.
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
// Returns memory from this thread's buffer number `use` (0, 1 or 2).
inline float* ScratchFor(int use, int64_t count) {
  thread_local Scratch scratch[3];
  return scratch[use].Get(count);
}

}  // namespace libai
