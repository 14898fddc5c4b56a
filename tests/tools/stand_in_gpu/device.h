/* A GPU that is not there: its memory is memory of the host, its streams run as late as waits allow.
 *
 * Nothing here knows of CUDA; runtime.c and driver.c speak for it. Every function that can fail
 * returns false, and `device_message` says why. All of them take the one lock of the device.
 */
#ifndef STAND_IN_DEVICE_H
#define STAND_IN_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_STREAMS 256

/* What lies at an address. */
typedef enum {
    ON_HOST,     /* unknown to the device: pageable memory */
    ON_DEVICE,   /* allocated and not freed */
    PINNED,      /* page-locked memory of the host */
    RESERVED,    /* addresses without memory behind them */
} Place;

typedef struct {
    uint8_t *start;
    size_t size;
    Place place;
    bool is_registered; /* pinned memory that belongs to others */
} Range;

/* The steps of every stream that are known to be over. */
typedef struct {
    uint64_t steps[MAX_STREAMS];
} Clock;

typedef struct Stream Stream;
typedef struct Event Event;
typedef void (*Call)(void *);

/* memory.c */
void device_set_limit(size_t bytes);
size_t device_limit(void);
size_t device_used(void);
bool device_allocate(size_t size, void **address);
bool device_free(void *address);
bool device_pin(size_t size, void **address);
bool device_unpin(void *address);
bool device_register(void *address, size_t size);
bool device_unregister(void *address);
bool device_reserve(size_t size, void **address);
bool device_release(void *address, size_t size);
bool device_map(void *address, size_t size);
bool device_unmap(void *address, size_t size);
bool device_take(size_t size);
void device_give(size_t size);
bool device_range_at(const void *address, Range *found);

/* streams.c */
Stream *stream_default(void);
Stream *stream_create(void);
void stream_destroy(Stream *stream);
bool stream_copy(Stream *stream, void *target, const void *source, size_t size);
bool stream_fill(Stream *stream, void *target, int value, size_t size);
void stream_call(Stream *stream, Call function, void *data);
bool stream_query(Stream *stream);
bool stream_synchronize(Stream *stream);
bool device_synchronize(void);
/* A kernel begins: all before it in its stream is over, and it may touch what it was given.
 * It must be executed before the caller launches anything else. */
bool stream_kernel(
    Stream *stream, const char *name, int count, void *const *starts, const size_t *sizes,
    const bool *writes
);

Event *event_create(void);
void event_destroy(Event *event);
void event_record(Event *event, Stream *stream);
void event_wait(Event *event, Stream *stream);
bool event_query(Event *event);
bool event_synchronize(Event *event);
bool event_seconds(Event *begin, Event *end, double *seconds);

/* The last fault; a fault of memory or of order is kept, as a GPU's context is lost with it. */
const char *device_message(void);
bool device_is_lost(void);
void device_forget_fault(void);

/* Between the files, with the lock held. */
void lock(void);
void unlock(void);
bool fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
Range *range_at(const void *address);
bool is_covered(const void *address, size_t size);
bool run_all(void);
void forget_accesses(const void *start, size_t size);

#endif
