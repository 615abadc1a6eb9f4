// Access to tensors by row and column, for any element type, tagged or not.
#pragma once

#include "cuda/fault.cuh"
#include "cuda/words.cuh"

namespace megavm {

__device__ __forceinline__ DType dtype_of(const Tensor& t) {
  return static_cast<DType>(t.address >> kDtypeShift & 0xf);
}
__device__ __forceinline__ bool is_tagged(const Tensor& t) { return t.address >> kTaggedShift & 1; }
// Whether all ranks get what is written. Such an operand begins with the share of the own rank, in
// the memory of rank 0, and instructions do not read it.
__device__ __forceinline__ bool is_gathered(const Tensor& t) {
  return program::kRanks > 1 && (t.address >> kGatheredShift & 1);
}
// Columns that instructions of this rank write.
__device__ __forceinline__ uint32_t own_columns(const Tensor& t) {
  return is_gathered(t) ? t.columns / program::kRanks : t.columns;
}
__device__ __forceinline__ bool is_f32(const Tensor& t) { return dtype_of(t) == DType::kF32; }
__device__ __forceinline__ Layout layout_of(const Tensor& t) {
  return static_cast<Layout>(t.address >> kLayoutShift & 0xf);
}
__device__ __forceinline__ uint64_t base_of(const Tensor& t) {
  return t.address & ((uint64_t{1} << kDtypeShift) - 1);
}
__device__ __forceinline__ uint32_t element_bytes(const Tensor& t) {
  return dtype_of(t) == DType::kBf16 ? 2 : 4;
}

// Address of an element of an untagged, row-major tensor.
__device__ __forceinline__ uint64_t element_at(const Tensor& t, uint32_t row, uint32_t column) {
  return base_of(t) + (static_cast<uint64_t>(row) * t.columns + column) * element_bytes(t);
}

// Address of the tagged word that holds an element.
__device__ __forceinline__ uint64_t word_at(const Tensor& t, uint32_t row, uint32_t column) {
  const uint32_t per_word = 4 / element_bytes(t);
  const uint32_t shift = per_word - 1;  // 1 or 2 elements in a word
  return base_of(t) + 4 * (static_cast<uint64_t>(row) * (t.columns >> shift) + (column >> shift));
}

// An address in the memory of rank 0, in that of another rank.
__device__ __forceinline__ uint64_t on_rank(uint64_t address, uint32_t rank) {
  return address + (uint64_t{rank} << kRankShift);
}

// A gathered tensor of which one rank alone gets what is written; any other tensor as it is.
__device__ __forceinline__ Tensor written_on(Tensor t, uint32_t only) {
  if (only == kNone || !is_gathered(t)) return t;
  t.address = on_rank(t.address & ~(uint64_t{1} << kGatheredShift), only);
  return t;
}

// Call store(address) for the element that is at `address`, on every rank if it is gathered.
template <class Store>
__device__ __forceinline__ void store_shares(bool gathered, uint64_t address, Store&& store) {
  store(address);
  if constexpr (program::kRanks > 1)
    if (gathered)
#pragma unroll
      for (uint32_t rank = 1; rank < program::kRanks; ++rank) store(on_rank(address, rank));
}

// The value of a tagged word that this lane is about to write; 0 if it is empty. All ranks have it:
// the own one is nearest.
__device__ __forceinline__ uint32_t written_word(const Tensor& t, uint64_t address) {
  if (is_gathered(t)) address = on_rank(address, control().rank);
  const uint32_t value = ptx::load_rewritten(address);
  return value == kEmptyWord ? 0 : value;
}

// Index of the operand word that names a tensor; fault records use it.
using OperandWord = uint32_t;

// An element of a weight or of another tensor that no instruction writes.
__device__ __forceinline__ float constant_element(const Tensor& t, uint32_t row, uint32_t column) {
  const uint64_t address = element_at(t, row, column);
  if (is_f32(t)) return __uint_as_float(ptx::load_constant(address));
  return ptx::from_bf16(ptx::load_constant_half(address));
}

__device__ __forceinline__ int32_t constant_integer(const Tensor& t, uint32_t row,
                                                    uint32_t column) {
  return static_cast<int32_t>(ptx::load_constant(element_at(t, row, column)));
}

__device__ __forceinline__ unsigned short to_bf16(float value) {
  return static_cast<unsigned short>(ptx::pack_bf16(value, 0.0f));
}

// Store two neighbouring elements, the first in an even column. Without `with_second` only the
// first is stored, except that a tagged bf16 word always stores both.
__device__ __forceinline__ void write_pair(const Tensor& t, uint32_t row, uint32_t column,
                                           float first, float second, bool with_second) {
  if (is_tagged(t)) {
    store_shares(is_gathered(t), word_at(t, row, column), [&](uint64_t address) {
      // A row is made of whole words, so the second bf16 element always exists.
      if (!is_f32(t)) return publish(address, ptx::pack_bf16(first, second));
      publish(address, __float_as_uint(first));
      if (with_second) publish(address + 4, __float_as_uint(second));
    });
    return;
  }
  store_shares(is_gathered(t), element_at(t, row, column), [&](uint64_t address) {
    if (is_f32(t)) {
      ptx::store(address, __float_as_uint(first));
      if (with_second) ptx::store(address + 4, __float_as_uint(second));
    } else if (with_second && address % 4 == 0) {
      ptx::store(address, ptx::pack_bf16(first, second));
    } else {
      ptx::store_half(address, to_bf16(first));
      if (with_second) ptx::store_half(address + 2, to_bf16(second));
    }
  });
}

// Store two neighbouring elements by one instruction. Bits of `form`: 1 float32, else bf16; 2
// tagged.
__device__ __forceinline__ void store_elements(uint32_t form, uint64_t to, float first,
                                               float second) {
  if (form == 3)
    publish2(to, __float_as_uint(first), __float_as_uint(second));
  else if (form == 2)
    publish(to, ptx::pack_bf16(first, second));
  else if (form == 1)
    ptx::store2(to, __float_as_uint(first), __float_as_uint(second));
  else
    ptx::store(to, ptx::pack_bf16(first, second));
}

// The destination of two neighbouring elements, computed ahead of the store.
struct PairPlace {
  uint64_t address = 0;
  // Bits: 1 float32, else bf16; 2 tagged; 4 gathered. kNone: not one store, see below.
  uint32_t kind = 0;

  __device__ __forceinline__ PairPlace() : address(0), kind(kNone) {}
  __device__ __forceinline__ PairPlace(uint64_t address, uint32_t kind)
      : address(address), kind(kind) {}
  __device__ __forceinline__ PairPlace(const Tensor& t, uint32_t row, uint32_t column)
      : address(is_tagged(t) ? word_at(t, row, column) : element_at(t, row, column)),
        kind(is_f32(t) + 2 * is_tagged(t)) {
    // One store instruction writes both elements, so the address must be aligned for it.
    if (address % (form_bytes() * 2) != 0)
      kind = kNone;
    else if (is_gathered(t))
      kind += 4;
  }

  // The place that is `columns` (an even number) further in the row.
  __device__ __forceinline__ PairPlace after(uint32_t columns) const {
    PairPlace place = *this;
    place.address += columns * form_bytes();
    return place;
  }

  // The place in the same columns so many rows further, a multiple of 4: it is aligned alike.
  __device__ __forceinline__ void move(const Tensor& t, uint32_t rows) {
    address += uint64_t{rows} * (t.columns * element_bytes(t));
  }

  // Store pairs that are kStep columns apart, times `factor`.
  template <uint32_t kStep, uint32_t kCount>
  __device__ __forceinline__ void store_all(const float (&pairs)[kCount][2], float factor) const {
    store_shares(kind & 4, address, [&](uint64_t to) {
      // NOTE: the branches are around the stores of all pairs: this code is run once, and most of
      // its time would be that of fetching it.
      const auto each = [&](uint32_t bytes, auto&& store) {
#pragma unroll
        for (uint32_t i = 0; i < kCount; ++i)
          store(to + i * kStep * bytes, pairs[i][0] * factor, pairs[i][1] * factor);
      };
      if (form() == 3)
        each(4, [&](uint64_t at, float first, float second) {
          publish2(at, __float_as_uint(first), __float_as_uint(second));
        });
      else if (form() == 2)
        each(2, [&](uint64_t at, float first, float second) {
          publish(at, ptx::pack_bf16(first, second));
        });
      else if (form() == 1)
        each(4, [&](uint64_t at, float first, float second) {
          ptx::store2(at, __float_as_uint(first), __float_as_uint(second));
        });
      else
        each(2, [&](uint64_t at, float first, float second) {
          ptx::store(at, ptx::pack_bf16(first, second));
        });
    });
  }

  __device__ __forceinline__ void store(float first, float second) const {
    store_shares(kind & 4, address,
                 [&](uint64_t to) { store_elements(form(), to, first, second); });
  }

 private:
  __device__ __forceinline__ uint32_t form() const { return program::kRanks > 1 ? kind & 3 : kind; }
  __device__ __forceinline__ uint32_t form_bytes() const { return 2u << (kind & 1); }  // an element
};

// Four neighbouring columns of a row, the first a multiple of four.
struct Four {
  float value[4];
};

// Whether fours of a tensor can be stored at once.
__device__ __forceinline__ bool takes_fours(const Tensor& t) {
  return dtype_of(t) != DType::kI32 && t.columns % 4 == 0 && base_of(t) % 16 == 0;
}

// The place of neighbouring columns in any row: what is the same for all rows. Lanes that are not
// `active` load and store nothing.
// kKinds: a bit 1 << kind for each kind of tensor that it can be, of the lower two bits of `kind`.
template <uint32_t kKinds = 0xf>
struct ColumnPlace {
  uint64_t address = 0;  // in row 0
  uint32_t row_bytes = 0;
  uint32_t kind = 0;  // bits: 1 float32, else bf16; 2 tagged; 4 gathered

  ColumnPlace() = default;
  // The column is even if the elements are bf16.
  __device__ __forceinline__ ColumnPlace(const Tensor& t, uint32_t column)
      : kind(is_f32(t) + 2 * is_tagged(t) + 4 * is_gathered(t)) {
    address = base_of(t) + uint64_t{column} * column_bytes();
    row_bytes = t.columns * column_bytes();
  }

  // Store an element of float32, so many columns after the first.
  __device__ __forceinline__ void store_one(uint32_t row, uint32_t further, float value,
                                            bool active = true) const {
    const uint32_t word = __float_as_uint(value);
    const uint64_t at = address + uint64_t{row} * row_bytes + further * column_bytes();
    store_shares(kind & 4, at, [&](uint64_t to) {
      if_form<3>(active, [&](bool stores) { publish(to, word, stores); });
      if_form<1>(active, [&](bool stores) { ptx::store(to, word, stores); });
    });
  }

  // Store two neighbouring columns, an even number of columns `further`. The first column is even.
  __device__ __forceinline__ void store_pair(uint32_t row, uint32_t further, float first,
                                             float second, bool active = true) const {
    const uint64_t at = address + uint64_t{row} * row_bytes + further * column_bytes();
    const uint32_t x = __float_as_uint(first), y = __float_as_uint(second);
    const uint32_t both = ptx::pack_bf16(first, second);
    store_shares(kind & 4, at, [&](uint64_t to) {
      if_form<3>(active, [&](bool stores) { publish2(to, x, y, stores); });
      if_form<2>(active, [&](bool stores) { publish(to, both, stores); });
      if_form<1>(active, [&](bool stores) { ptx::store2(to, x, y, stores); });
      if_form<0>(active, [&](bool stores) { ptx::store(to, both, stores); });
    });
  }

  // Store four `number`, counted from the first column, which is a multiple of four.
  __device__ __forceinline__ void store(uint32_t row, uint32_t number, const Four& four,
                                        bool active = true) const {
    const float (&v)[4] = four.value;
    const uint32_t bytes = 4 * column_bytes();
    const ptx::Words4 words = {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                               __float_as_uint(v[3])};
    const uint32_t low = ptx::pack_bf16(v[0], v[1]), high = ptx::pack_bf16(v[2], v[3]);
    store_shares(kind & 4, address + uint64_t{row} * row_bytes + number * bytes, [&](uint64_t to) {
      if_form<3>(active, [&](bool stores) {
        publish2(to, words.x, words.y, stores);
        publish2(to + 8, words.z, words.w, stores);
      });
      if_form<2>(active, [&](bool stores) { publish2(to, low, high, stores); });
      if_form<1>(active, [&](bool stores) { ptx::store4(to, words, stores); });
      if_form<0>(active, [&](bool stores) { ptx::store2(to, low, high, stores); });
    });
  }

  // Store the first two fours.
  __device__ __forceinline__ void store_two(uint32_t row, const Four (&two)[2]) const {
    if (form() == 0 && (address | row_bytes) % 16 == 0) {
      const float (&a)[4] = two[0].value, (&b)[4] = two[1].value;
      return store_shares(kind & 4, address + uint64_t{row} * row_bytes, [&](uint64_t to) {
        ptx::store4(to, {ptx::pack_bf16(a[0], a[1]), ptx::pack_bf16(a[2], a[3]),
                         ptx::pack_bf16(b[0], b[1]), ptx::pack_bf16(b[2], b[3])});
      });
    }
    store(row, 0, two[0]);
    store(row, 1, two[1]);
  }

  // Load four `number` of a tensor that has_fours.
  __device__ __forceinline__ ptx::Words4 load(uint32_t row, uint32_t number) const {
    return ptx::load_relaxed4(address + uint64_t{row} * row_bytes + 16 * number);
  }
  // The same, if the lane is active.
  __device__ __forceinline__ void load(uint32_t row, uint32_t number, ptx::Words4& to,
                                       bool active) const {
    ptx::load_relaxed4(address + uint64_t{row} * row_bytes + 16 * number, to, active);
  }

 private:
  // Call store(active and the form is this), if it can be: no branch.
  template <uint32_t kForm, class Store>
  __device__ __forceinline__ void if_form(bool active, Store&& store) const {
    if constexpr (kKinds >> kForm & 1) store(active && form() == kForm);
  }

  __device__ __forceinline__ uint32_t column_bytes() const { return 2u << (form() & 1); }

  // Bits: 1 float32, else bf16; 2 tagged. Known to the compiler as far as kKinds says it.
  __device__ __forceinline__ uint32_t form() const {
    if constexpr ((kKinds & (kKinds - 1)) == 0)
      return kKinds == 8 ? 3 : kKinds / 2;
    else if constexpr (kKinds < 4)
      return kind & 1;
    else
      return program::kRanks > 1 ? kind & 3 : kind;
  }
};

// Whether fours can be loaded: float32 that other instructions store, not tagged.
__device__ __forceinline__ bool has_fours(const Tensor& t) {
  return is_f32(t) && !is_tagged(t) && t.columns % 4 == 0 && base_of(t) % 16 == 0;
}
__device__ __forceinline__ void add_four(Four& to, const ptx::Words4& words) {
  to.value[0] += __uint_as_float(words.x);
  to.value[1] += __uint_as_float(words.y);
  to.value[2] += __uint_as_float(words.z);
  to.value[3] += __uint_as_float(words.w);
}

// Four neighbouring elements of a vector that no instruction writes, loaded at once. kKinds: see
// ColumnPlace.
template <uint32_t kKinds = 3>
struct FourConstants {
  ptx::Words2 raw[2];  // the second is for float32

  // Whether there is such a load for every multiple of four.
  static __device__ __forceinline__ bool can_load(const Tensor& t) {
    return dtype_of(t) != DType::kI32 && base_of(t) % 16 == 0;
  }
  // If the lane is active. Without a branch, as loads behind one are waited for one by one.
  __device__ __forceinline__ void load(const Tensor& t, uint32_t first, bool active) {
    const uint64_t from = ColumnPlace<kKinds>(t, first).address;
    ptx::load_constant2(from, raw[0], active);
    if constexpr (kKinds & 2) ptx::load_constant2(from + 8, raw[1], active && is_f32(t));
  }
  __device__ __forceinline__ Four value(const Tensor& t) const {
    const auto choose = [&](uint32_t wide, float narrow) {
      if constexpr (kKinds == 1) return narrow;
      return kKinds == 2 || is_f32(t) ? __uint_as_float(wide) : narrow;
    };
    return {{choose(raw[0].x, ptx::low_bf16(raw[0].x)), choose(raw[0].y, ptx::high_bf16(raw[0].x)),
             choose(raw[1].x, ptx::low_bf16(raw[0].y)),
             choose(raw[1].y, ptx::high_bf16(raw[0].y))}};
  }
};

// The same, at once.
__device__ __forceinline__ Four four_constants(const Tensor& t, uint32_t first) {
  FourConstants<> constants = {};
  constants.load(t, first, true);
  return constants.value(t);
}

// Eight neighbouring elements of a vector that no instruction writes, loaded at once.
struct EightConstants {
  ptx::Words4 raw[2];  // the second is for float32

  // Whether there is such a load for every multiple of eight.
  static __device__ __forceinline__ bool can_load(const Tensor& t) {
    return dtype_of(t) != DType::kI32 && base_of(t) % 16 == 0;
  }
  __device__ __forceinline__ void load(const Tensor& t, uint32_t first) {
    const uint64_t from = element_at(t, first, 0);
    raw[0] = ptx::load_constant4(from);
    if (is_f32(t)) raw[1] = ptx::load_constant4(from + 16);
  }
  // Element i.
  __device__ __forceinline__ float value(const Tensor& t, uint32_t i) const {
    const auto word = [&](const ptx::Words4& w, uint32_t n) {
      return n == 0 ? w.x : n == 1 ? w.y : n == 2 ? w.z : w.w;
    };
    if (is_f32(t)) return __uint_as_float(word(raw[i / 4], i % 4));
    return i % 2 ? ptx::high_bf16(word(raw[0], i / 2)) : ptx::low_bf16(word(raw[0], i / 2));
  }
};

// Store one element. The other element of a tagged bf16 word keeps its value.
// NOTE: two lanes that store the two elements of such a word at a time lose one: use write_pair.
__device__ __forceinline__ void write_element(const Tensor& t, uint32_t row, uint32_t column,
                                              float value) {
  if (!is_tagged(t) || is_f32(t)) return write_pair(t, row, column, value, 0.0f, false);
  const uint64_t place = word_at(t, row, column);
  const uint32_t old = written_word(t, place), half = to_bf16(value);
  const uint32_t word = column % 2 ? half << 16 | (old & 0xffff) : (old & 0xffff0000u) | half;
  store_shares(is_gathered(t), place, [&](uint64_t address) { publish(address, word); });
}

}  // namespace megavm
