#pragma once

#include "vm/cpu/product.hpp"

namespace megavm::MEGAVM_LEVEL {

// Position of a row in its sequence, and the KV block that receives its key and value.
struct Slot {
  int32_t position;
  int32_t block;
};

// One block of work: up to 16 rotation pairs of one head.
struct Pairs {
  int64_t head;   // counted over query, key and value heads
  int64_t first;  // first element within the head; the partner of an element is d / 2 further
  int count;
};

struct QkvRopeTile {
  const QkvRope& inst;
  Worker& worker;
  int64_t half;             // d / 2
  int64_t blocks_per_head;  // blocks begin at multiples of 16 rotation pairs of a head
  int64_t heads;            // query heads
  int64_t kv_heads;

  QkvRopeTile(const QkvRope& inst, Worker& worker) : inst(inst), worker(worker) {
    half = worker.tensor(inst.rope).columns / 2;
    blocks_per_head = (half + kLanes - 1) / kLanes;
    heads = worker.tensor(inst.q).columns / (2 * half);
    kv_heads = worker.tensor(inst.k_cache).shape[1];
  }

  // Number of the block that holds a rotation pair, counted over all heads.
  int64_t block_number(int64_t pair) const {
    return pair / half * blocks_per_head + pair % half / kLanes;
  }

  int num_blocks() const {
    return static_cast<int>(block_number(inst.pair_end - int64_t{1}) -
                            block_number(inst.pair_begin)) +
           1;
  }

  // The rotation pairs in block b of the tile.
  Pairs pairs_of(int b) const {
    const int64_t number = block_number(inst.pair_begin) + b;
    const int64_t head = number / blocks_per_head;
    const int64_t first_pair = head * half;
    int64_t begin = number % blocks_per_head * kLanes;
    int64_t end = begin + kLanes < half ? begin + kLanes : half;
    begin = first_pair + begin < inst.pair_begin ? inst.pair_begin - first_pair : begin;
    end = first_pair + end > inst.pair_end ? inst.pair_end - first_pair : end;
    return {head, begin, static_cast<int>(end - begin)};
  }

  // The weight's row of the first of the pairs; that of the partner is d / 2 further.
  int64_t weight_row(const Pairs& p) const { return p.head * 2 * half + p.first; }

  // Store p.count results of a row, from `element` of the head on, as query, key or value.
  void store_half(const Pairs& p, int64_t row, const Slot& slot, int64_t element,
                  const Vec& value) const {
    if (p.head < heads)
      return store_row(worker, inst.q, row, p.head * 2 * half + element, value, p.count);
    const bool is_key = p.head < heads + kv_heads;
    const int64_t head = (p.head - heads) % kv_heads;
    const uint32_t copy = is_key ? inst.k_new : inst.v_new;
    if (copy != kNone) store_row(worker, copy, row, head * 2 * half + element, value, p.count);
    const Tensor& cache = worker.tensor(is_key ? inst.k_cache : inst.v_cache);
    const int64_t offset =
        ((slot.block * kv_heads + head) * cache.shape[2] + slot.position % cache.shape[2]) * 2 *
            half +
        element;
    if (cache.dtype == DType::kBf16)
      return store(static_cast<Bf16*>(cache.data) + offset, value, p.count);
    store(static_cast<float*>(cache.data) + offset, value, p.count);
  }

  void finish(const Pairs& p, int64_t row, const Slot& slot, Vec a, Vec b) const {
    if (inst.bias != kNone) {
      a = a + load_bias(worker, inst.bias, weight_row(p), p.count);
      b = b + load_bias(worker, inst.bias, weight_row(p) + half, p.count);
    }
    if (p.head < heads + kv_heads) {
      const Vec cos = load_row(worker, inst.rope, slot.position, p.first, p.count);
      const Vec sin = load_row(worker, inst.rope, slot.position, half + p.first, p.count);
      const Vec turned = a * cos - b * sin;
      b = b * cos + a * sin;
      a = turned;
    }
    store_half(p, row, slot, p.first, a);
    store_half(p, row, slot, half + p.first, b);
  }
};

template <typename Weight>
inline void qkv_rope(const QkvRopeTile& tile, const Input& in, const Slot* slots,
                     int64_t first_row) {
  const auto block_at = [&](int b) {
    const Pairs p = tile.pairs_of(b);
    const Weight* rows = tile.worker.weight_row<Weight>(tile.inst.weight, tile.weight_row(p));
    return Block<Weight>{{rows, rows + tile.half * in.k}, {p.count, p.count}};
  };
  product<Weight>(tile.worker, in, tile.num_blocks(), block_at,
                  [&](int b, int i, const Vec& low, const Vec& high) {
                    tile.finish(tile.pairs_of(b), first_row + i, slots[i], low, high);
                  });
}

inline void execute(const QkvRope& inst, Worker& worker) {
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  if (live.begin == live.end) return;
  const Tensor& cache = worker.tensor(inst.k_cache);
  const Tensor& table = worker.tensor(inst.block_table);
  const int64_t positions = worker.tensor(inst.rope).rows;
  const int64_t block_size = cache.shape[2];
  Slot* slots = worker.allocate<Slot>(live.end - live.begin);
  for (int64_t row = live.begin; row < live.end; ++row) {
    const int64_t position = position_of(worker, inst.row_position, row, positions, "rope");
    const int64_t sequence =
        sequence_of(worker, inst.row_sequence, row, inst.block_table, "block_table");
    position_of(worker, inst.row_position, row, table.columns * block_size, "block_table");
    const int64_t block =
        kv_block(worker, inst.block_table, sequence, position / block_size, cache.shape[0]);
    slots[row - live.begin] = {static_cast<int32_t>(position), static_cast<int32_t>(block)};
  }
  const Input in{inst.x,
                 inst.x_squares,
                 inst.eps,
                 worker.tensor(inst.weight).columns,
                 static_cast<int>(inst.row_end - inst.row_begin),
                 static_cast<int>(live.end - live.begin),
                 input_rows(worker, live, kNone, inst.row_end)};
  const QkvRopeTile tile(inst, worker);
  with_weight_type(worker, inst.weight, [&]<typename Weight>(const Weight*) {
    qkv_rope<Weight>(tile, in, slots, live.begin);
  });
}

}  // namespace megavm::MEGAVM_LEVEL
