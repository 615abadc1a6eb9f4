// Attention of a run: several rows of one sequence, which see nearly the same tokens.
//
// The query rows of a tile are the heads of one KV head for each row of the run. Two warpgroups
// have 64 or 128 of them each, and attend to 128 tokens in a turn (warpgroup.cuh).
#pragma once

#include "instructions/attention/warpgroup.cuh"

namespace megavm {

template <uint32_t kD>
struct AttentionTile : AttentionWarpgroup<kD> {
  using Warpgroup = AttentionWarpgroup<kD>;
  using typename Warpgroup::Scores, typename Warpgroup::State, typename Warpgroup::Turn;
  using typename Warpgroup::Values, typename Warpgroup::Weights;
  using Warpgroup::attend, Warpgroup::count, Warpgroup::drain, Warpgroup::lane, Warpgroup::mask;
  using Warpgroup::in, Warpgroup::run, Warpgroup::scale, Warpgroup::warp;
  using Warpgroup::kBlock, Warpgroup::kBlocks, Warpgroup::kGroup, Warpgroup::kPageBlocks;
  using Warpgroup::kPanelMmas, Warpgroup::kPanels, Warpgroup::kParts, Warpgroup::kTokens;
  using Warpgroup::kValueBlock, Warpgroup::kValuePanel, Warpgroup::kValueTiles;
  using Warpgroup::kWarpRows, Warpgroup::kWarps;
  using Warpgroup::number;
  static constexpr uint32_t kBlockSize = attention::kBlockSize;
  static constexpr uint32_t kPiece = min_of(kBlockSize, kBlock);  // that one box holds
  // Half of a warpgroup's queries, in bytes.
  static constexpr uint32_t kQueryPanel = kParts * kPanels * kWarps * kWarpRows * kBoxRowBytes / 2;
  // NOTE: depends on kD: compilers check others even where there are no tiles.
  static_assert(kLanes * kPiece % kTokens == 0 && kBlock % kPiece == 0);
  // A turn and the one before it are in the ring.
  static_assert(!attention::kRuns || 4 * kPanels <= kPages);
  static_assert(!attention::kRuns || kNumConsumers / kWarps * kQueryPanel <= kScratch);

  uint32_t row;   // first row of the run
  uint32_t head;  // KV head

  __device__ __forceinline__ AttentionTile(const Operands<Attention>& in, const AttentionRun& run,
                                           uint32_t row, uint32_t head, uint32_t warp)
      : Warpgroup(in, run, warp), row(row), head(head) {}

  // ---- The loader's part.

  static __device__ __forceinline__ void load(const Operands<Attention>& in, Loader& loader,
                                              const AttentionRun& run, uint32_t head) {
    const Tensor& keys = in[&Attention::k_cache];
    const uint32_t heads = keys.columns / (kBlockSize * kD), lane = lane_index();
    const uint32_t tokens = run.cached - run.begin;
    const uint64_t key_map = map_of(in, loader, &Attention::k_cache);
    const uint64_t value_map = map_of(in, loader, &Attention::v_cache);
    uint32_t rows = 0;  // lane i: where piece i of the next kLanes pieces begins, as a row of heads
#pragma unroll 1
    for (uint32_t at = 0; at < tokens; at += kTokens) {
      if (at % (kLanes * kPiece) == 0) {
        const uint32_t token = run.begin + at + lane * kPiece;
        if (token < run.cached)
          rows =
              (kv_block(in[&Attention::block_table], run.sequence, token / kBlockSize, keys.rows) *
                   heads +
               head) *
                  kBlockSize +
              token % kBlockSize;
        end_together();
      }
      const uint32_t there = min_of(kTokens, tokens - at), pieces = ceil_div(there, kPiece);
      const uint32_t boxes = pieces * 2 * kPanels;
      const PageCursor first = loader.begin_pages(pages_of(there), boxes * kPiece * kBoxRowBytes);
#pragma unroll 1
      for (uint32_t begin = 0; begin < boxes; begin += kLanes) {
        const uint32_t box = begin + lane, piece = box / (2 * kPanels);
        const uint32_t panel = box % kPanels, token = piece * kPiece, block = token / kBlock;
        const bool values = box / kPanels % 2 != 0;
        const uint32_t from = __shfl_sync(~0u, rows, (at / kPiece + piece) % kLanes);
        PageCursor page = first;
        page.advance(values ? kPanels + block / kPageBlocks : panel);
        const uint32_t to = values ? block % kPageBlocks * kValueBlock + panel * kValuePanel +
                                         token % kBlock * kBoxRowBytes
                                   : token * kBoxRowBytes;
        if (box < boxes)
          loader.copy_box(first, page, to, values ? value_map : key_map, panel * kBoxColumns, from,
                          true);
      }
    }
  }
  static __device__ __forceinline__ uint64_t map_of(const Operands<Attention>& in, Loader& loader,
                                                    uint32_t Attention::* cache) {
    return loader.map_of(in.stage.words.operands[in.word(cache)], 0);
  }

  // Pages of a turn of so many tokens.
  static __device__ __forceinline__ uint32_t pages_of(uint32_t tokens) {
    return kPanels + ceil_div(tokens, kPageBlocks * kBlock);
  }

  // ---- The consumers' part.

  // Where queries of this warpgroup are: those of the second panel, or of the second part.
  __device__ __forceinline__ uint32_t queries(const Consumer& consumer) const {
    return consumer.scratch(warp / kWarps * kQueryPanel);
  }

  // Load the queries, once they are ready, and clear the sums. Query rows beyond the last one
  // repeat it. A warp loads those of its own rows, whole lines of them, and passes them on through
  // the scratch. For a negative scale they are turned round.
  __device__ __forceinline__ void start(Consumer& consumer, State& state) const {
    constexpr uint32_t kChunks = kBoxRowBytes / 16, kRowsAtOnce = kLanes / kChunks;
    constexpr uint32_t kLoads = kWarpRows / kRowsAtOnce;
    const Tensor& q = in[&Attention::q];
    const uint32_t sign = in.inst.scale < 0.0f ? 0x80008000u : 0;
    const uint32_t chunk = lane() % kChunks;
    ptx::Words4 words[kParts * kPanels][kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kParts * kPanels; ++i)
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j) {
        const uint32_t mine = (i / kPanels * kNumConsumers + warp) * kWarpRows + j * kRowsAtOnce;
        const uint32_t query = min_of(mine + lane() / kChunks, count() - 1);
        const uint32_t column = (head * kGroup + query % kGroup) * kD + i % kPanels * kBoxColumns;
        words[i][j] = ptx::load_relaxed4(element_at(q, row + query / kGroup, column + chunk * 8));
      }
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        state.highest[part][half] = -kInfinity;
        state.total[part][half] = 0.0f;
      }
#pragma unroll
      for (float& sum : state.sum[part]) sum = __uint_as_float(ptx::zero());
    }
    consumer.sync_alive();  // no warp multiplies queries that were there before
    const uint32_t at = queries(consumer) + warp % kWarps * kWarpRows * kBoxRowBytes;
    const auto put = [&](const ptx::Words4(&of)[kLoads]) {
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j) {
        const uint32_t mine = j * kRowsAtOnce + lane() / kChunks;
        ptx::store_shared4(at + mine * kBoxRowBytes + (chunk ^ mine % 8) * 16,
                           {of[j].x ^ sign, of[j].y ^ sign, of[j].z ^ sign, of[j].w ^ sign});
      }
    };
    put(words[0]);
    __syncwarp();
    const uint32_t mine = lane() / 4, from = at + mine * kBoxRowBytes + lane() % 4 * 4;
#pragma unroll
    for (uint32_t i = 0; i < kPanelMmas; ++i) {
      const uint32_t first = (2 * i ^ mine) * 16, next = (2 * i + 1 ^ mine) * 16;
      state.q[i] = {
          ptx::load_shared(from + first), ptx::load_shared(from + 8 * kBoxRowBytes + first),
          ptx::load_shared(from + next), ptx::load_shared(from + 8 * kBoxRowBytes + next)};
    }
    __syncwarp();
    put(words[1]);
    ptx::fence_proxy_async_shared();
    ptx::sync_warpgroup(warp / kWarps);
  }

  // Values that are not there, or of tokens beyond the run's, have weight 0 but may be anything,
  // NaN included: make them zeros. All consumers call it. False if the worker is stopping.
  static __device__ __forceinline__ bool clear_values(Consumer& consumer, uint32_t values,
                                                      uint32_t from) {
    constexpr uint32_t kChunk = 16;
    const uint32_t begin = from * kBoxRowBytes / kChunk, end = kValuePanel / kChunk;
#pragma unroll 1
    for (uint32_t panel = 0; panel < kPanels; ++panel)
#pragma unroll 1
      for (uint32_t i = begin + consumer.thread(); i < end; i += kNumConsumerThreads)
        ptx::store_shared4(values + panel * kValuePanel + i * kChunk, {0, 0, 0, 0});
    ptx::fence_proxy_async_shared();
    return consumer.sync_unless_stopping();
  }

  // Store the results.
  __device__ __forceinline__ void finish(const State& state) const {
    const bool whole = in.inst.num_splits == 1;
    const Tensor& to = whole ? in[&Attention::out] : in[&Attention::partial];
    const uint32_t heads = in[&Attention::q].columns / kD;
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        float total = state.total[part][half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const float factor = whole ? __fdividef(1.0f, total) : 1.0f;
        const uint32_t mine = number(part, half), pair = lane() % 4 * 2;
        if (mine >= count()) continue;
        const uint32_t query = head * kGroup + mine % kGroup;
        const uint32_t base = whole ? query * kD : (in.inst.split * heads + query) * (kD + 2);
        const PairPlace place(to, row + mine / kGroup, base + pair);
        float pairs[kValueTiles][2];
#pragma unroll
        for (uint32_t i = 0; i < kValueTiles; ++i)
#pragma unroll
          for (uint32_t j = 0; j < 2; ++j) pairs[i][j] = state.sum[part][4 * i + 2 * half + j];
        place.template store_all<8>(pairs, factor);
        if (!whole && pair == 0)
          place.after(kD).store(state.highest[part][half] * scale * kLn2, total);
      }
  }

  // Turns until one begins with this token or a later one.
  __device__ __forceinline__ uint32_t turns_to(uint32_t token) const {
    return ceil_div(max_of(token, run.begin) - run.begin, kTokens);
  }
  // Tokens of the last turn.
  __device__ __forceinline__ uint32_t last_tokens() const {
    return (run.cached - run.begin - 1) % kTokens + 1;
  }

  // All of it: read the tokens of the run.
  // NOTE: as in matrix products (matrix.cuh, multiply), no warp ends between wgmmas.
  // `first_run`: whether it is the first one of the instruction.
  __device__ __forceinline__ void process(Consumer& consumer, bool first_run) const {
    State state;
    start(consumer, state);
    if (first_run) consumer.note(in.stage, Event::kInputs);
    bool stops = false;
    // The first token that none of this warpgroup's query rows sees.
    const uint32_t group = warp / kWarps * kWarps;
    const uint32_t last =
        min_of(((kParts - 1) * kNumConsumers + group + kWarps) * kWarpRows, count()) - 1;
    const uint32_t end =
        group * kWarpRows < count() ? TokenRange(in.inst, run.position + last / kGroup).end : 0;
    // Tokens that all query rows see.
    const uint32_t seen_begin = TokenRange(in.inst, run.position + run.rows - 1).begin;
    const uint32_t seen_end = TokenRange(in.inst, run.position).end;
    // NOTE: what a turn must know are numbers of turns that are left, because no register is.
    // The last `idle` turns have no tokens for this warpgroup. Some query row does not see all
    // tokens of a turn if more than `seen` or at most `masked` are left.
    const uint32_t turns = turns_to(run.cached), idle = turns - turns_to(end);
    const uint32_t seen = turns - turns_to(seen_begin);
    const uint32_t masked = turns - (max_of(seen_end, run.begin) - run.begin) / kTokens;
    Weights weights;
#pragma unroll
    for (ptx::Words4& words : weights) words = {ptx::zero(), ptx::zero(), ptx::zero(), ptx::zero()};
    uint32_t unfinished = 0;  // pages of the turn before
    uint32_t left = turns;
    const auto operands_of = [&](const PageCursor& first, uint32_t tokens) {
      PageCursor page = first;
      Turn turn = {{}, ptx::uniform(queries(consumer)), Values(first, tokens)};
#pragma unroll
      for (uint32_t& panel : turn.keys) {
        panel = ptx::uniform(page.address());
        page.advance();
      }
      return turn;
    };
    const auto end_turn = [&] { consumer.finish_pages(unfinished, stops); };
#pragma unroll 1
    while (left > 0) {
      // Turns of which all query rows see all tokens, but for the last of all.
      uint32_t whole = 0;
      if (left <= seen) whole = left - min_of(left, max_of(masked, 1));
      left -= whole;
#pragma unroll 1
      for (; whole > 0; --whole) {
        PageCursor page = consumer.page;
        page.advance(unfinished);
        stops |= !consumer.has_step_arrived(page);
        const Turn turn = operands_of(page, kTokens);
        // Before the first turn there are no weights: its own values, times 0.
        attend(
            turn, Values(consumer.page, kTokens), weights, state, [](uint32_t, Scores&) {},
            end_turn);
        unfinished = pages_of(kTokens);
      }
      if (left == 0) break;
      const uint32_t tokens = left > 1 ? kTokens : last_tokens();
      PageCursor page = consumer.page;
      page.advance(unfinished);
      stops |= !consumer.has_step_arrived(page);
      if (left == 1) consumer.note(in.stage, Event::kLoadArrived);
      const Turn turn = operands_of(page, tokens);
      if (tokens % kBlock != 0)
        stops |= !clear_values(consumer, turn.values.block[kBlocks - 1], tokens % kBlock);
      const Values before(consumer.page, unfinished == 0 ? tokens : kTokens);
      if (left > idle) {
        attend(
            turn, before, weights, state,
            [&](uint32_t part, Scores& score) {
              mask(run.begin + (turns_to(run.cached) - left) * kTokens, part, score);
            },
            end_turn);
      } else {
        if (left == idle && unfinished != 0) drain(weights, before, state);
        end_turn();
      }
      unfinished = pages_of(tokens);
      --left;
    }
    if (idle == 0 && unfinished != 0) drain(weights, Values(consumer.page, last_tokens()), state);
    consumer.finish_pages(unfinished, stops);
    if (stops) page_arrived(consumer.page.slot).give_up(consumer.page.phase);
    consumer.note(in.stage, Event::kComputed);
    finish(state);
  }
};

}  // namespace megavm
