/* The C library as a plugin: loaded by name at run time, by a program that links nothing of it.
 * Usage: dlopen_test LIBRARY */
#include <dlfcn.h>
#include <fusedmoe_selection.h>
#include <stdio.h>
#include <string.h>

static void* library;

static void* find(const char* name) {
  void* symbol = dlsym(library, name);
  if (!symbol) fprintf(stderr, "%s\n", dlerror());
  return symbol;
}

/* ISO C has no conversion from void* to a function pointer, POSIX has. */
/* NOLINTNEXTLINE(bugprone-macro-parentheses) */
#define FIND(function) (*(void**)& function = find("fusedmoe_" #function))

int main(int argc, char** argv) {
  library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  if (!library) {
    fprintf(stderr, "usage: dlopen_test LIBRARY (%s)\n", argc == 2 ? dlerror() : "no argument");
    return 1;
  }
  const char* (*version)(void);
  const char* (*last_error)(void);
  fusedmoe_status (*explain)(const fusedmoe_moe_config*, fusedmoe_selection**);
  const char* (*selection_table)(const fusedmoe_selection*);
  void (*selection_destroy)(fusedmoe_selection*);
  if (!FIND(version) || !FIND(last_error) || !FIND(explain) || !FIND(selection_table) ||
      !FIND(selection_destroy)) {
    return 1;
  }
  fusedmoe_moe_config config = {
      .struct_size = sizeof config, .num_experts = 8, .topk = 2, .hidden = 64, .intermediate = 32};
  fusedmoe_selection* selection = NULL;
  if (explain(&config, &selection) != FUSEDMOE_OK) {
    fprintf(stderr, "%s\n", last_error());
    return 1;
  }
  printf("version %s\n%s\n", version(), selection_table(selection));
  const int found =
      strstr(selection_table(selection), "cpu") != NULL && strcmp(version(), FUSEDMOE_VERSION) == 0;
  selection_destroy(selection);
  return found ? 0 : 1;
}
