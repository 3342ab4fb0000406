// The border to Python: TVM-FFI's C interface read as tensors, scalars and slots, and torch's
// thread pool.
//
// Only the C header of TVM-FFI is included, so an object compiles in seconds and needs no C++ ABI
// agreement with anybody. Arguments arrive validated; what is checked here only keeps a mismatched
// build from crashing.
#pragma once

#include <stdint.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

#include "vector.h"

namespace kda {

constexpr int D = 128;
constexpr double kDefaultScale = 0.08838834764831845;  // D ** -0.5

enum class Type { f32, bf16, f16, other };

struct Tensor {
  char* data = nullptr;
  int ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* stride = nullptr;  // in elements
  Type type = Type::other;
  int bytes = 0;  // of an element

  explicit operator bool() const { return shape != nullptr; }
  template <class T>
  T* at(int64_t element) const {
    return reinterpret_cast<T*>(data) + element;
  }
};

// The arguments of a call, taken one after the other. The first that is not what was asked for is
// remembered.
class Arguments {
 public:
  Arguments(const TVMFFIAny* args, int32_t count) : next_(args), left_(count) {}

  Tensor tensor() {
    Tensor t = optional_tensor();
    if (!t) wrong_ = true;
    return t;
  }

  Tensor optional_tensor() {
    Tensor t;
    const TVMFFIAny* a = take();
    if (a == nullptr || a->type_index == kTVMFFINone) return t;
    const DLTensor* dl = nullptr;
    if (a->type_index == kTVMFFIDLTensorPtr) dl = static_cast<const DLTensor*>(a->v_ptr);
    if (a->type_index == kTVMFFITensor) dl = TVMFFITensorGetDLTensorPtr(a->v_obj);
    if (dl == nullptr || dl->strides == nullptr || dl->device.device_type != kDLCPU) {
      wrong_ = true;
      return t;
    }
    t.data = static_cast<char*>(dl->data) + dl->byte_offset;
    t.ndim = dl->ndim;
    t.shape = dl->shape;
    t.stride = dl->strides;
    t.bytes = dl->dtype.bits / 8;
    if (dl->dtype.code == kDLFloat && dl->dtype.bits == 32) t.type = Type::f32;
    if (dl->dtype.code == kDLFloat && dl->dtype.bits == 16) t.type = Type::f16;
    if (dl->dtype.code == kDLBfloat && dl->dtype.bits == 16) t.type = Type::bf16;
    return t;
  }

  bool optional_number(double* value) {
    const TVMFFIAny* a = take();
    if (a == nullptr || a->type_index == kTVMFFINone) return false;
    if (a->type_index == kTVMFFIFloat) {
      *value = a->v_float64;
    } else if (a->type_index == kTVMFFIInt) {
      *value = static_cast<double>(a->v_int64);
    } else {
      wrong_ = true;
    }
    return true;
  }

  float number(double fallback) {
    double value = fallback;
    optional_number(&value);
    return static_cast<float>(value);
  }

  bool optional_integer(int64_t* value) {
    const TVMFFIAny* a = take();
    if (a == nullptr || a->type_index == kTVMFFINone) return false;
    if (a->type_index == kTVMFFIInt) {
      *value = a->v_int64;
    } else {
      wrong_ = true;
    }
    return true;
  }

  bool is_word(const char* word) {
    const TVMFFIAny* a = take();
    const size_t n = strlen(word);
    if (a == nullptr) return false;
    if (a->type_index == kTVMFFISmallStr) {
      return a->small_str_len == n && memcmp(a->v_bytes, word, n) == 0;
    }
    if (a->type_index == kTVMFFIRawStr) return strcmp(a->v_c_str, word) == 0;
    if (a->type_index == kTVMFFIStr) {
      const TVMFFIByteArray* bytes = TVMFFIBytesGetByteArrayPtr(a->v_obj);
      return bytes->size == n && memcmp(bytes->data, word, n) == 0;
    }
    wrong_ = true;
    return false;
  }

  // True when every argument was there and of its kind; otherwise the error is set and the call
  // returns -1.
  bool complete(const char* message) {
    if (!wrong_ && left_ == 0) return true;
    TVMFFIErrorSetRaisedFromCStr("TypeError", message);
    return false;
  }

 private:
  const TVMFFIAny* take() {
    if (left_ <= 0) {
      wrong_ = true;
      return nullptr;
    }
    --left_;
    return next_++;
  }

  const TVMFFIAny* next_;
  int32_t left_;
  bool wrong_ = false;
};

// ---- rows and slots ----

// A [rows, ...] argument whose rows are compact and lie any distance apart; a leading dimension of
// one may precede the rows.
struct Rows {
  char* data;
  int64_t step;  // bytes from row to row

  Rows(const Tensor& t, int row_axis) : data(t.data), step(t ? t.stride[row_axis] * t.bytes : 0) {}
  template <class T>
  T* at(int64_t row, int64_t element) const {
    return reinterpret_cast<T*>(data + row * step) + element;
  }
};

struct Integers {
  const char* data = nullptr;
  int64_t step0 = 0, step1 = 0;  // bytes
  bool wide = false;

  explicit Integers(const Tensor& t) {
    if (!t) return;
    data = t.data;
    wide = t.bytes == 8;
    step0 = t.stride[0] * t.bytes;
    step1 = t.ndim > 1 ? t.stride[1] * t.bytes : 0;
  }
  int64_t at(int64_t i, int64_t j = 0) const {
    const char* p = data + i * step0 + j * step1;
    if (wide) {
      int64_t value;
      memcpy(&value, p, 8);
      return value;
    }
    int32_t value;
    memcpy(&value, p, 4);
    return value;
  }
};

// The one null rule: which slot an index names, or -1.
struct SlotRule {
  int64_t slots;
  int64_t first = 0;
  bool wraps = true;  // first_slot None: negative indices count from the end

  int64_t operator()(int64_t index) const {
    if (wraps && index < 0) index += slots;  // an index below -slots stays negative
    return index >= (wraps || first < 0 ? 0 : first) && index < slots ? index : -1;
  }
};

// Without state_indices row i uses slot i and first_slot is not consulted.
inline SlotRule slot_rule(int64_t slots, bool has_indices, bool has_first, int64_t first) {
  if (!has_indices) return {slots, 0, false};
  return {slots, first, !has_first};
}

// ---- torch's threads ----

typedef void (*Work)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Work work, void* context);

typedef int32_t (*NumThreads)(uint32_t* count);

// Addresses of torch's functions, set once by the loader; without them everything runs on the
// calling thread.
struct Threads {
  ParallelFor parallel_for = nullptr;
  NumThreads num_threads = nullptr;
};

inline Threads& threads() {
  static Threads addresses;
  return addresses;
}

inline int64_t thread_count() {
  uint32_t count = 1;
  if (threads().num_threads == nullptr || threads().num_threads(&count) != 0) return 1;
  return count;
}

// Runs task(i) for i in [0, count). Tasks are independent of each other, so the split over threads
// changes no bit of the result.
template <class Task>
inline void parallel(int64_t count, const Task& task) {
  const Work work = [](int64_t begin, int64_t end, void* context) {
    const Task& each = *static_cast<const Task*>(context);
    for (int64_t i = begin; i < end; ++i) each(i);
  };
  void* context = const_cast<Task*>(&task);
  const ParallelFor run = threads().parallel_for;
  if (count > 1 && run != nullptr && run(0, count, 1, work, context) == 0) return;
  work(0, count, context);
}

}  // namespace kda

#define KDA_EXPORT extern "C" __attribute__((visibility("default"))) int

// What every object exports beside its operator: the setter of torch's functions, and its vector
// width in floats.
KDA_EXPORT __tvm_ffi_set_threads(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  if (count != 2 || args[0].type_index != kTVMFFIInt || args[1].type_index != kTVMFFIInt) {
    TVMFFIErrorSetRaisedFromCStr("TypeError", "set_threads takes two addresses");
    return -1;
  }
  kda::threads().parallel_for =
      reinterpret_cast<kda::ParallelFor>(static_cast<intptr_t>(args[0].v_int64));
  kda::threads().num_threads =
      reinterpret_cast<kda::NumThreads>(static_cast<intptr_t>(args[1].v_int64));
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  return 0;
}

KDA_EXPORT __tvm_ffi_vector_width(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = kda::W;
  return 0;
}
