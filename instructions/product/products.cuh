// The kernel of all product instructions of a program, see kernel.cuh.
#pragma once

#include "instructions/product/matrix.cuh"
#include "instructions/product/matrix_scales.cuh"
#include "instructions/product/row.cuh"
#include "instructions/product/rows.cuh"

namespace megavm {

template <class... Instructions>
struct Products {
  using Used = List<Instructions...>;

  static constexpr bool kStores = kStorerFinishes;

  // The registers of the epilogues in product_rows.
  struct Shared : Used {
    using Early = SharedRegisters<typename Epilogue<Instructions>::Early...>;
    using Kept = SharedRegisters<typename Epilogue<Instructions>::Kept...>;
  };

  static __device__ __forceinline__ bool has(uint32_t opcode) {
    return ((opcode == Instructions::kOpcode) || ...);
  }

  static __device__ __forceinline__ Product product(const Stage& stage) {
    Product found = no_product();
    Used::dispatch(stage.words.header.opcode,
                   [&]<class I>(I*) { found = Epilogue<I>(stage).product(); });
    return found;
  }

  static __device__ __forceinline__ void load(const Stage& stage, Loader& loader) {
    const Product p = product(stage);
    if (p.is_matrix()) return load_matrix(stage, p, loader);
    if constexpr (program::kAnyProduct) load_product(stage, p, loader);
  }

  static __device__ __forceinline__ void consume(const Stage& stage, Consumer& consumer) {
    const Product p = product(stage);
    if constexpr (program::kMatrixRows > 0)
      if (p.is_matrix()) return MatrixConsumer<Used>(stage, p, consumer).run();
    if constexpr (kStorerFinishes)
      product_row(stage, p, consumer);
    else if constexpr (program::kAnyProduct)
      product_rows<Shared>(stage, p, consumer);
  }

  static __device__ __forceinline__ void store(const Stage& stage, Storer& storer) {
    if constexpr (kStorerFinishes)
      Used::dispatch(stage.words.header.opcode, [&]<class I>(I*) { finish_row<I>(stage, storer); });
    if constexpr (program::kMatrixRows > 0 && program::kAnySquares != 0) {
      const Product p = product(stage);
      if (p.is_matrix()) MatrixScales(stage, p).run(storer);
    }
  }
};

}  // namespace megavm
