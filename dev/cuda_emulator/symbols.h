// The program's own symbol table: the name of a kernel by its address, and its static __shared__ variables, which
// g++ makes ordinary static variables of the kernel: those of kernel _Z4sortPf are called _ZZ4sortPfE<name>.
// A program without a symbol table (strip) has nameless kernels, and their static shared memory is not looked after.
#ifndef EMULATOR_SYMBOLS_H
#define EMULATOR_SYMBOLS_H

#include <elf.h>      // Elf64_Sym
#include <fcntl.h>    // open
#include <link.h>     // dl_iterate_phdr
#include <map>        // map
#include <string>     // string
#include <sys/mman.h> // mmap
#include <sys/stat.h> // fstat
#include <unistd.h>   // close
#include <vector>     // vector

namespace emu {

struct SharedVariable {
    char *start;
    size_t n_bytes;
};

struct KernelInfo {
    std::vector<SharedVariable> shared;
    size_t shared_bytes = 0;    // static
    size_t dynamic_limit = 0;   // what cudaFuncSetAttribute has granted, beyond the usual 48 KB in all
    unsigned long launches = 0; // begun
};

struct Symbols {
    std::map<void *, std::string> functions;
    std::map<std::string, SharedVariable> locals; // _ZZ...: static variables of functions
};

inline Symbols read_symbols() {
    Symbols symbols;
    char *base = nullptr; // where the program is loaded: its own entry comes first
    dl_iterate_phdr([](dl_phdr_info *info, size_t, void *to) { return *(char **)to = (char *)info->dlpi_addr, 1; },
                    &base);
    int file = open("/proc/self/exe", O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0) return symbols;
    void *mapped = mmap(nullptr, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return symbols;
    const char *image = (const char *)mapped;
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    for (int s = 0; s < header->e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB) continue;
        const Elf64_Sym *all = (const Elf64_Sym *)(image + sections[s].sh_offset);
        const char *names = image + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *all; i++) {
            const char *name = names + all[i].st_name;
            if (ELF64_ST_TYPE(all[i].st_info) == STT_FUNC && all[i].st_value != 0)
                symbols.functions[base + all[i].st_value] = name;
            else if (ELF64_ST_TYPE(all[i].st_info) == STT_OBJECT && strncmp(name, "_ZZ", 3) == 0)
                symbols.locals[name] = SharedVariable{base + all[i].st_value, all[i].st_size};
        }
    }
    munmap(mapped, (size_t)status.st_size);
    return symbols;
}

inline KernelInfo *kernel_info(void *function) {
    static const Symbols symbols = read_symbols();
    static std::map<void *, KernelInfo> infos;
    auto found = infos.find(function);
    if (found != infos.end()) return &found->second;
    KernelInfo *info = &infos[function];
    auto symbol = symbols.functions.find(function);
    if (symbol == symbols.functions.end()) return info;
    std::string prefix = "_ZZ" + symbol->second.substr(2) + "E";
    for (auto local = symbols.locals.lower_bound(prefix);
         local != symbols.locals.end() && local->first.compare(0, prefix.size(), prefix) == 0; ++local) {
        info->shared.push_back(local->second);
        info->shared_bytes += local->second.n_bytes;
    }
    return info;
}

} // namespace emu

#endif
