/* Memory: what is allocated, within which limit, and whether an access stays inside. */
#define _GNU_SOURCE
#include "device.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define POISON 0xFF             /* four of them are a float32 NaN, two a bfloat16 one */
#define MOST_POISONED ((size_t)64 << 20) /* larger allocations stay untouched pages of zeros */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char message[512];
static bool is_lost;

static Range *ranges; /* in the order of their addresses; they do not overlap */
static size_t range_count, range_capacity;
static size_t limit = (size_t)24 << 30;
static size_t used;

void lock(void) { pthread_mutex_lock(&mutex); }

void unlock(void) { pthread_mutex_unlock(&mutex); }

/* A fault that loses the device, as an illegal address does. */
bool fault(const char *format, ...) {
    if (is_lost) return false; /* the first one is the cause */
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    is_lost = true;
    return false;
}

/* A call that cannot be served, after which the device goes on. */
bool refuse(const char *format, ...) {
    if (is_lost) return false;
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return false;
}

const char *device_message(void) { return message; }

bool device_is_lost(void) { return is_lost; }

void device_forget_fault(void) {
    is_lost = false;
    message[0] = '\0';
}

/* The index of the first range that ends behind an address. */
static size_t place_of(const uint8_t *address) {
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start + ranges[middle].size > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

Range *range_at(const void *address) {
    size_t place = place_of(address);
    if (place == range_count || ranges[place].start > (const uint8_t *)address) return NULL;
    return &ranges[place];
}

static void add_range(void *start, size_t size, Place place, bool is_registered) {
    if (range_count == range_capacity) {
        range_capacity = 2 * range_capacity + 64;
        ranges = realloc(ranges, range_capacity * sizeof *ranges);
    }
    size_t index = place_of(start);
    memmove(&ranges[index + 1], &ranges[index], (range_count - index) * sizeof *ranges);
    ranges[index] = (Range){start, size, place, is_registered};
    range_count++;
}

static void remove_range(Range *range) {
    size_t index = range - ranges;
    memmove(range, range + 1, (range_count - index - 1) * sizeof *ranges);
    range_count--;
}

/* Whether all of it lies in memory of one place; mapped pieces may follow each other. */
bool is_covered(const void *address, size_t size) {
    const uint8_t *position = address, *end = position + size;
    Range *range = range_at(position);
    if (range == NULL) return false;
    Place place = range->place;
    while (range != NULL && range->place == place && place != RESERVED) {
        position = range->start + range->size;
        if (position >= end) return true;
        range = range_at(position);
    }
    return false;
}

bool device_range_at(const void *address, Range *found) {
    lock();
    Range *range = range_at(address);
    if (range != NULL) *found = *range;
    unlock();
    return range != NULL;
}

void device_set_limit(size_t bytes) { limit = bytes; }

size_t device_limit(void) { return limit; }

size_t device_used(void) { return used; }

static size_t whole_pages(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

/* Pages with one behind them that nobody may touch. */
static void *new_pages(size_t size) {
    size_t whole = whole_pages(size);
    void *pages = mmap(
        NULL, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0
    );
    if (pages == MAP_FAILED) return NULL;
    mprotect((uint8_t *)pages + whole, PAGE, PROT_NONE);
    return pages;
}

static void poison(void *start, size_t size) {
    if (size <= MOST_POISONED) memset(start, POISON, size);
}

static bool take(size_t size) {
    if (size > limit - used)
        return refuse("out of memory: %zu bytes, and %zu are free", size, limit - used);
    used += size;
    return true;
}

bool device_take(size_t size) {
    lock();
    bool fits = take(size);
    unlock();
    return fits;
}

void device_give(size_t size) {
    lock();
    used -= size;
    unlock();
}

bool device_allocate(size_t size, void **address) {
    lock();
    bool fits = take(whole_pages(size));
    if (fits) {
        *address = new_pages(size);
        poison(*address, size);
        add_range(*address, size, ON_DEVICE, false);
    }
    unlock();
    return fits;
}

/* Free pages of one kind, when all streams have run. */
static bool free_pages(void *address, Place place) {
    Range *range = range_at(address);
    if (range == NULL || range->start != address || range->place != place || range->is_registered)
        return fault("freed memory that is not allocated: %p", address);
    if (!run_all()) return false;
    size_t size = range->size;
    remove_range(range);
    forget_accesses(address, size);
    munmap(address, whole_pages(size) + PAGE);
    if (place == ON_DEVICE) used -= whole_pages(size);
    return true;
}

bool device_free(void *address) {
    lock();
    bool is_done = free_pages(address, ON_DEVICE);
    unlock();
    return is_done;
}

bool device_pin(size_t size, void **address) {
    lock();
    *address = new_pages(size);
    poison(*address, size);
    add_range(*address, size, PINNED, false);
    unlock();
    return true;
}

bool device_unpin(void *address) {
    lock();
    bool is_done = free_pages(address, PINNED);
    unlock();
    return is_done;
}

/* A page can be locked once only. */
bool device_register(void *address, size_t size) {
    lock();
    uint8_t *start = (uint8_t *)((uintptr_t)address / PAGE * PAGE);
    size_t next = place_of(start);
    bool is_free = next == range_count || ranges[next].start >= (uint8_t *)address + size;
    if (is_free)
        add_range(address, size, PINNED, true);
    else
        refuse("the pages at %p are locked already", address);
    unlock();
    return is_free;
}

bool device_unregister(void *address) {
    lock();
    Range *range = range_at(address);
    bool is_locked = range != NULL && range->start == address && range->is_registered;
    if (is_locked) {
        run_all();
        forget_accesses(address, range->size);
        remove_range(range);
    } else {
        refuse("the pages at %p are not locked", address);
    }
    unlock();
    return is_locked;
}

/* Addresses to which memory is mapped later (expandable segments). */
bool device_reserve(size_t size, void **address) {
    *address = mmap(
        NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0
    );
    return *address != MAP_FAILED;
}

bool device_release(void *address, size_t size) { return munmap(address, size) == 0; }

bool device_map(void *address, size_t size) {
    lock();
    mprotect(address, size, PROT_READ | PROT_WRITE);
    poison(address, size);
    add_range(address, size, ON_DEVICE, false);
    unlock();
    return true;
}

bool device_unmap(void *address, size_t size) {
    lock();
    bool is_done = true;
    uint8_t *position = address, *end = position + size;
    while (is_done && position < end) {
        Range *range = range_at(position);
        is_done = range != NULL && range->start == position && run_all();
        if (!is_done) break;
        position += range->size;
        remove_range(range);
    }
    if (is_done) {
        forget_accesses(address, size);
        madvise(address, size, MADV_DONTNEED);
        mprotect(address, size, PROT_NONE);
    } else {
        fault("unmapped memory that is not mapped: %p", address);
    }
    unlock();
    return is_done;
}
