// Counts the calls of the entries of csrc. Every entry is compiled after this header, which wraps
// the function that EMB_IMPL registers.
#pragma once

namespace pretend {

void count_entry(const char* name, int calls);

}  // namespace pretend

#if defined(PRETEND_ENTRIES)

#include "core/entry.h"

namespace pretend {

template <auto function, class Name>
struct CountedEntry;

template <class Result, class... Arguments, Result (*function)(Arguments...), class Name>
struct CountedEntry<function, Name> {
  static Result call(Arguments... arguments) {
    count_entry(Name::get(), 1);
    return emb::Entry<function, Name>::call(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace pretend

#undef EMB_IMPL
#define EMB_IMPL(library, space, name)                                                  \
  do {                                                                                  \
    struct Name {                                                                       \
      static const char* get() { return #name; }                                        \
    };                                                                                  \
    pretend::count_entry(#name, 0);                                                     \
    library.impl(#name, TORCH_BOX((&pretend::CountedEntry<&space::name, Name>::call))); \
  } while (false)

#endif
