// thrust::counting_iterator for the pretend GPU.
#pragma once

namespace thrust {

template <class T>
struct counting_iterator {
  T first;
  explicit counting_iterator(T x) : first(x) {}
  T operator[](long long i) const { return static_cast<T>(first + i); }
};

}  // namespace thrust
