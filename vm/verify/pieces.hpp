// A map from the elements of a tensor to values, kept as rectangles of equal value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "vm/verify/happens_before.hpp"

namespace megavm::verify {

// Bounds the time and the memory of a search, over all of its maps.
class Effort {
 public:
  explicit Effort(const ProgramView& program) : program_(program) {}

  // Both throw std::length_error beyond the limit.
  void add_visits(std::size_t count) {
    visits_ += count;
    if (visits_ > kMaxVisits) fail_for_visits();
  }
  void add_pieces(std::ptrdiff_t count) {
    pieces_ += count;
    if (pieces_ > kMaxPieces) fail_for_pieces();
  }

 private:
  static constexpr std::size_t kMaxVisits = 1'000'000'000;
  static constexpr std::ptrdiff_t kMaxPieces = 1 << 23;  // less than a gigabyte

  [[noreturn]] void fail_for_visits() const;
  [[noreturn]] void fail_for_pieces() const;

  const ProgramView& program_;
  std::size_t visits_ = 0;
  std::ptrdiff_t pieces_ = 0;
};

struct RectangleHash {
  std::size_t operator()(const Rectangle& r) const {
    std::uint64_t hash = 0;
    for (const auto border : {r.row_begin, r.row_end, r.column_begin, r.column_end})
      hash = (hash ^ static_cast<std::uint64_t>(border)) * 0x9e3779b97f4a7c15u;
    return static_cast<std::size_t>(hash ^ hash >> 32);
  }
};

// Bands of rows, each cut into pieces. Updates cut at the borders of their rectangle; what has
// become equal again is joined, in an amortised time that is proportional to the number of pieces
// that updates visit. Values are compared with ==.
template <typename Value>
class PieceMap {
 public:
  // All elements of `whole` have the same value. Updates and looks stay inside it.
  PieceMap(const Rectangle& whole, Effort& effort) : whole_(whole), effort_(&effort) {
    bands_.push_back({whole.row_begin, whole.row_end, {{whole.column_begin, {}}}});
    add_pieces(1);
  }

  const Rectangle& whole() const { return whole_; }

  // Calls visit(value, rectangle) for the pieces of a rectangle, until it returns false. `visit`
  // may change the value.
  template <typename Visit>
  void update(const Rectangle& where, Visit visit) {
    const auto first = cut_rows(where.row_begin), last = cut_rows(where.row_end);
    std::size_t begin = 0, end = 0;
    for (auto number = first; number < last; ++number) {
      auto& band = bands_[number];
      begin = cut_columns(band, where.column_begin, begin);
      end = cut_columns(band, where.column_end, end);
      count_visits(end - begin);
      for (auto piece = begin; piece < end; ++piece)
        if (!visit(band.pieces[piece].value, rectangle(band, piece))) return;
      join_pieces(band, begin, end);
    }
    if (last - first > 1 && visits_ >= pieces_) join_bands();
  }

  // Calls visit(value) likewise, without changes; returns whether every call returned true.
  template <typename Visit>
  bool look(const Rectangle& where, Visit visit) const {
    for (auto number = band_at(where.row_begin);
         number < bands_.size() && bands_[number].begin < where.row_end; ++number) {
      const auto& pieces = bands_[number].pieces;
      for (auto piece = piece_at(bands_[number], where.column_begin);
           piece < pieces.size() && pieces[piece].begin < where.column_end; ++piece) {
        effort_->add_visits(1);
        if (!visit(pieces[piece].value)) return false;
      }
    }
    return true;
  }

 private:
  struct Piece {
    std::int64_t begin;  // column; it ends where the next one begins
    Value value;
    bool operator==(const Piece& other) const {
      return begin == other.begin && value == other.value;
    }
  };
  struct Band {
    std::int64_t begin, end;  // rows
    std::vector<Piece> pieces;
  };

  static constexpr std::size_t kMovedPerVisit = 32;  // pieces or bands that an insertion moves

  std::size_t band_at(std::int64_t row) const {
    const auto after = std::upper_bound(bands_.begin(), bands_.end(), row,
                                        [](auto r, const Band& band) { return r < band.begin; });
    return static_cast<std::size_t>(after - bands_.begin()) - 1;
  }
  static std::size_t piece_at(const Band& band, std::int64_t column) {
    const auto after = std::upper_bound(band.pieces.begin(), band.pieces.end(), column,
                                        [](auto c, const Piece& piece) { return c < piece.begin; });
    return static_cast<std::size_t>(after - band.pieces.begin()) - 1;
  }
  Rectangle rectangle(const Band& band, std::size_t piece) const {
    const auto next = piece + 1;
    const auto end = next < band.pieces.size() ? band.pieces[next].begin : whole_.column_end;
    return {band.begin, band.end, band.pieces[piece].begin, end};
  }

  // The number of the band that begins at `row`.
  std::size_t cut_rows(std::int64_t row) {
    if (row == bands_.back().end) return bands_.size();
    const auto number = band_at(row);
    if (bands_[number].begin == row) return number;
    auto lower = bands_[number];
    lower.begin = bands_[number].end = row;
    add_pieces(static_cast<std::ptrdiff_t>(lower.pieces.size()));
    count_visits(lower.pieces.size() + (bands_.size() - number) / kMovedPerVisit);
    bands_.insert(bands_.begin() + static_cast<std::ptrdiff_t>(number) + 1, std::move(lower));
    return number + 1;
  }
  // The number of the piece that begins at `column`. `guess`: its number in the band before, which
  // is often the same.
  std::size_t cut_columns(Band& band, std::int64_t column, std::size_t guess) {
    if (column == whole_.column_end) return band.pieces.size();
    if (guess < band.pieces.size() && band.pieces[guess].begin == column) return guess;
    const auto number = piece_at(band, column);
    if (band.pieces[number].begin == column) return number;
    band.pieces.insert(band.pieces.begin() + static_cast<std::ptrdiff_t>(number) + 1,
                       {column, Value(band.pieces[number].value)});
    add_pieces(1);
    count_visits((band.pieces.size() - number) / kMovedPerVisit);
    return number + 1;
  }

  void join_pieces(Band& band, std::size_t begin, std::size_t end) {
    const auto first = band.pieces.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = band.pieces.begin() + static_cast<std::ptrdiff_t>(end);
    const auto kept =
        std::unique(first, last, [](const Piece& a, const Piece& b) { return a.value == b.value; });
    add_pieces(kept - last);
    band.pieces.erase(kept, last);
  }
  void join_bands() {
    visits_ = 0;
    std::size_t kept = 0;
    for (std::size_t number = 1; number < bands_.size(); ++number) {
      if (bands_[kept].pieces == bands_[number].pieces) {
        bands_[kept].end = bands_[number].end;
        add_pieces(-static_cast<std::ptrdiff_t>(bands_[number].pieces.size()));
      } else if (++kept != number) {
        bands_[kept] = std::move(bands_[number]);
      }
    }
    bands_.resize(kept + 1);
  }

  void add_pieces(std::ptrdiff_t count) {
    pieces_ += static_cast<std::size_t>(count);
    effort_->add_pieces(count);
  }
  void count_visits(std::size_t count) {
    visits_ += count;
    effort_->add_visits(count);
  }

  Rectangle whole_;
  std::vector<Band> bands_;
  std::size_t pieces_ = 0;
  std::size_t visits_ = 0;  // since bands were joined last
  Effort* effort_;
};

// The maps, by key_of(access), of the accesses for which it returns a key.
template <typename Value, typename KeyOf>
std::map<std::size_t, PieceMap<Value>> make_maps(const ProgramView& program, Effort& effort,
                                                 KeyOf key_of) {
  std::map<std::size_t, Rectangle> wholes;
  for (const auto& access : program.accesses) {
    const std::optional<std::size_t> key = key_of(access);
    if (!key) continue;
    const auto& where = access.where;
    auto& whole = wholes.try_emplace(*key, where).first->second;
    whole.row_begin = std::min(whole.row_begin, where.row_begin);
    whole.row_end = std::max(whole.row_end, where.row_end);
    whole.column_begin = std::min(whole.column_begin, where.column_begin);
    whole.column_end = std::max(whole.column_end, where.column_end);
  }
  std::map<std::size_t, PieceMap<Value>> maps;
  for (const auto& [key, whole] : wholes) maps.try_emplace(key, whole, effort);
  return maps;
}

}  // namespace megavm::verify
