// What the emulation asks of the module it is loaded from: where its thread-local variables are, and what its functions are called.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cxxabi.h>
#include <fstream>
#include <iterator>

#include "scheduler.h"

namespace emulated {

static thread_local volatile char here;  // so that this thread has that copy

Region find_variables() {
  here = 0;
  Region found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        const auto address = reinterpret_cast<uintptr_t>(&find_variables);
        bool is_ours = false;
        size_t size = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& part = info->dlpi_phdr[i];
          const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
          if (part.p_type == PT_LOAD && address >= begin && address < begin + part.p_memsz) is_ours = true;
          if (part.p_type == PT_TLS) size = part.p_memsz;
        }
        if (is_ours) *static_cast<Region*>(out) = {static_cast<char*>(info->dlpi_tls_data), size};
        return int(is_ours);
      },
      &found);
  return found;
}

// The kernel's name, out of the module's own symbols.
std::string name_of(const void* function) {
  Dl_info info;
  if (!dladdr(function, &info)) return "a kernel";
  std::ifstream file(info.dli_fname, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(bytes.data());
  if (bytes.size() < sizeof *header || header->e_shoff + header->e_shnum * sizeof(ElfW(Shdr)) > bytes.size()) return "a kernel";
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(bytes.data() + header->e_shoff);
  const auto offset = reinterpret_cast<uintptr_t>(function) - reinterpret_cast<uintptr_t>(info.dli_fbase);
  for (int s = 0; s < header->e_shnum; ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(bytes.data() + sections[s].sh_offset);
    const char* names = bytes.data() + sections[sections[s].sh_link].sh_offset;
    for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; ++i) {
      if (symbols[i].st_value != offset || (symbols[i].st_info & 15) != STT_FUNC) continue;
      int status = 0;
      const std::unique_ptr<char, void (*)(void*)> plain{abi::__cxa_demangle(names + symbols[i].st_name, nullptr, nullptr, &status), free};
      return status == 0 ? plain.get() : names + symbols[i].st_name;
    }
  }
  return "a kernel";
}

}  // namespace emulated
