/* What an interpreted kernel loads and stores, element by element, from and to wherever its pointers point.
 * interpreter_memory.py writes the struct of the arguments before this text; `size` is that of an element in bytes.
 */

#include <string.h>

#define EACH(kind, to, from)                                                                                            \
    for (int64_t i = 0; i < n; i++)                                                                                     \
        if (mask[i]) {                                                                                                  \
            kind element;                                                                                               \
            memcpy(&element, from, sizeof element); /* a pointer need not be aligned */                                 \
            memcpy(to, &element, sizeof element);                                                                       \
        }

#define BY_SIZE(move)                                                                                                   \
    switch (c->size) {                                                                                                  \
    case 1: move(uint8_t); break;                                                                                       \
    case 2: move(uint16_t); break;                                                                                      \
    case 4: move(uint32_t); break;                                                                                      \
    default: move(uint64_t);                                                                                            \
    }

#define LOAD(kind) EACH(kind, values + i * sizeof(kind), (const char *)(intptr_t)pointers[i])
#define STORE(kind) EACH(kind, (char *)(intptr_t)pointers[i], values + i * sizeof(kind))

#define ARGUMENTS                                                                                                       \
    const uint64_t *pointers = (const uint64_t *)(intptr_t)c->pointers;                                                 \
    const uint8_t *mask = (const uint8_t *)(intptr_t)c->mask;                                                           \
    char *values = (char *)(intptr_t)c->values;                                                                         \
    int64_t n = c->n;

int64_t load(const struct elements *c) {
    ARGUMENTS
    BY_SIZE(LOAD)
    return 0;
}

int64_t store(const struct elements *c) {
    ARGUMENTS
    BY_SIZE(STORE)
    return 0;
}
