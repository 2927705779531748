// How soon saved state is wanted again, learned from what happens.
//
// An object (a chunk, a page, a sequence) that was used `uses` times so far and last `age` seconds
// ago returns at some rate. The model counts, for every class of uses and every span of ages, how
// many objects returned and how long objects were there to be wanted; the quotient is the rate.
// What was evicted is watched on: it returns as well, and a model of what was kept alone would
// praise whatever the policy keeps.
//
// The worth of keeping an object is then an index in the sense of Gittins (1979): the best ratio,
// over all spans one could keep it from now, of the chance that it returns within the span to the
// time that it is expected to take up. The rate falls with age in most classes and rises again
// where users think for a while before they answer, so neither the present rate alone nor the mean
// one would do.
//
// Threading: plain values, no shared state. Times in seconds on any clock that does not go back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hcache::policy {

class ReturnModel {
 public:
  static constexpr int kClasses = 8;  // 1, 2, 3, 4, 5 to 8, 9 to 16, 17 to 32, more uses
  static constexpr int kAges = 24;    // spans: [0, 2 s), then each 1.6 times as long as before

  [[nodiscard]] static int class_of(uint32_t uses);  // uses >= 1
  [[nodiscard]] static int age_of(double age_s);
  // Where a span begins; of kAges: infinity.
  [[nodiscard]] static double age_begin_s(int age);

  // An object of a class was used again `age_s` after its last use.
  void returned(int object_class, double age_s);
  // An object of a class was watched from one age to another; each second is told once.
  void watched(int object_class, double from_age_s, double to_age_s);
  // Brings index() up to what was told since.
  void learn();

  // What a second of keeping it is worth, in returns per second; above 0.
  [[nodiscard]] double index(int object_class, int age) const {
    return index_[static_cast<size_t>(object_class)][static_cast<size_t>(age)];
  }

 private:
  struct Cell {
    double returns = 0;
    double seconds = 0;
  };
  using Row = std::array<Cell, kAges>;

  [[nodiscard]] std::array<double, kAges> rates(const Row& row, const Row& pooled) const;

  std::array<Row, kClasses> cells_{};
  std::array<std::array<double, kAges>, kClasses> index_{};
};

}  // namespace hcache::policy
