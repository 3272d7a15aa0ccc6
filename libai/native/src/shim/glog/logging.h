// Replaces glog, which liboneflow contains but does not export. The macros that OneFlow's headers use write to stderr.
#pragma once
#include <cstdlib>
#include <iostream>
#include <ostream>
#include <utility>
namespace libai_log {
constexpr bool INFO = false, WARNING = false, ERROR = false, FATAL = true;
class Line {
 public:
  explicit Line(bool is_fatal) : is_fatal_(is_fatal) {}
  ~Line() {
    std::cerr << std::endl;
    if (is_fatal_) std::abort();
  }
  template<typename T>
  Line& operator<<(const T& value) {
    std::cerr << value;
    return *this;
  }
  Line& operator<<(std::ostream& (*manipulator)(std::ostream&)) {
    std::cerr << manipulator;
    return *this;
  }

 private:
  bool is_fatal_;
};
struct Voidify {
  void operator&(Line&) {}
  void operator&(Line&&) {}
};
template<typename T>
T NotNull(T&& pointer) {
  if (pointer == nullptr) Line(FATAL) << "a pointer is null";
  return std::forward<T>(pointer);
}
}  // namespace libai_log
#define LOG(level) ::libai_log::Line(::libai_log::level)
#define LOG_IF(level, c) !(c) ? (void)0 : ::libai_log::Voidify() & LOG(level)
#define PLOG(level) LOG(level)
#define VLOG(n) LOG_IF(INFO, false)
#define CHECK(c) (c) ? (void)0 : ::libai_log::Voidify() & LOG(FATAL) << "check failed: " #c " "
#define PCHECK(c) CHECK(c)
#define CHECK_EQ(a, b) CHECK((a) == (b))
#define CHECK_NE(a, b) CHECK((a) != (b))
#define CHECK_LT(a, b) CHECK((a) < (b))
#define CHECK_LE(a, b) CHECK((a) <= (b))
#define CHECK_GT(a, b) CHECK((a) > (b))
#define CHECK_GE(a, b) CHECK((a) >= (b))
#define CHECK_NOTNULL(p) ::libai_log::NotNull(p)
#define DCHECK(c) while (false) CHECK(c)
#define DCHECK_EQ(a, b) DCHECK((a) == (b))
#define DCHECK_NE(a, b) DCHECK((a) != (b))
#define DCHECK_LT(a, b) DCHECK((a) < (b))
#define DCHECK_LE(a, b) DCHECK((a) <= (b))
#define DCHECK_GT(a, b) DCHECK((a) > (b))
#define DCHECK_GE(a, b) DCHECK((a) >= (b))
#define DCHECK_NOTNULL(p) (p)
