/* Streams and events: work waits in its stream until something needs it, and races are found.
 *
 * A copy is executed when the host or a kernel waits for it, so that a host that reads too early
 * sees what was there before. A kernel is executed when it is launched, after all that it waits
 * for. That it may run later on a GPU is not imitated; instead every access to memory is compared
 * with earlier ones (with vector clocks, as race detectors for threads do): two of them, one of
 * which writes, must be ordered by the stream, by events, or by a wait of the host.
 */
#define _GNU_SOURCE
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NAN_BYTE 0xFF

typedef enum { COPY, FILL, CALL, RECORD, WAIT } Kind;

typedef struct {
    Kind kind;
    void *target;
    const void *source;
    void *staging; /* pageable memory is copied here at once */
    size_t size;
    int value;
    Stream *other; /* WAIT: until this stream has taken so many steps */
    uint64_t step;
    Event *event;
    Call function;
    void *data;
} Work;

struct Stream {
    int number;
    Work *waiting; /* what is launched and not executed */
    size_t waiting_count, waiting_capacity;
    uint64_t launched, executed;
    Clock clock;
};

struct Event {
    Stream *stream; /* NULL before it is recorded */
    uint64_t step;
    Clock clock;
    double seconds; /* when it was reached last */
    int uses;       /* by waiting work, and by its owner */
};

typedef struct {
    const uint8_t *start, *end;
    int stream;
    uint64_t step;
    bool writes;
    char name[56];
} Access;

static Stream *streams[MAX_STREAMS];
static Clock host; /* what the host knows to be over */
static Access *accesses;
static size_t access_count, access_capacity;

static void join(Clock *clock, const Clock *other) {
    for (int number = 0; number < MAX_STREAMS; number++)
        if (other->steps[number] > clock->steps[number])
            clock->steps[number] = other->steps[number];
}

static Stream *new_stream(int number) {
    if (streams[number] == NULL) {
        streams[number] = calloc(1, sizeof(Stream));
        streams[number]->number = number;
    }
    return streams[number];
}

Stream *stream_default(void) {
    lock();
    Stream *stream = new_stream(0);
    unlock();
    return stream;
}

Stream *stream_create(void) {
    lock();
    int number = 1;
    while (number < MAX_STREAMS && streams[number] != NULL) number++;
    Stream *stream = number < MAX_STREAMS ? new_stream(number) : NULL;
    unlock();
    return stream;
}

/* Streams are few, and their clocks must stay: one that is destroyed is only run. */
void stream_destroy(Stream *stream) { stream_synchronize(stream); }

/* ---- what is executed, and when ---- */

static void let_go(Event *event) {
    if (--event->uses == 0) free(event);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static bool run_until(Stream *stream, uint64_t step);

static bool execute(Work *work) {
    switch (work->kind) {
    case COPY:
        if (!is_covered(work->target, work->size) ||
            (work->staging == NULL && !is_covered(work->source, work->size)))
            return fault("memory was freed before a copy of %zu bytes was over", work->size);
        memmove(work->target, work->staging ? work->staging : work->source, work->size);
        free(work->staging);
        return true;
    case FILL:
        if (!is_covered(work->target, work->size))
            return fault("memory was freed before it was filled with %zu bytes", work->size);
        memset(work->target, work->value, work->size);
        return true;
    case CALL:
        work->function(work->data);
        return true;
    case RECORD:
        work->event->seconds = now();
        let_go(work->event);
        return true;
    case WAIT:
        return run_until(work->other, work->step);
    }
    return true;
}

static bool run_until(Stream *stream, uint64_t step) {
    while (stream->executed < step) {
        Work work = stream->waiting[0];
        stream->waiting_count--;
        memmove(
            stream->waiting, stream->waiting + 1, stream->waiting_count * sizeof *stream->waiting
        );
        stream->executed++;
        if (!execute(&work)) return false;
    }
    return true;
}

bool run_all(void) {
    for (int number = 0; number < MAX_STREAMS; number++) {
        Stream *stream = streams[number];
        if (stream == NULL) continue;
        if (!run_until(stream, stream->launched)) return false;
        join(&host, &stream->clock);
    }
    return true;
}

/* A step of a stream begins: it follows what its stream did, and what the host has waited for. */
static void begin_step(Stream *stream) {
    join(&stream->clock, &host);
    stream->launched++;
    stream->clock.steps[stream->number] = stream->launched;
}

/* The same for one that is executed at once, with nothing waiting before it. */
static void begin_executed_step(Stream *stream) {
    begin_step(stream);
    stream->executed = stream->launched;
}

static void launch(Stream *stream, Work work) {
    begin_step(stream);
    if (stream->waiting_count == stream->waiting_capacity) {
        stream->waiting_capacity = 2 * stream->waiting_capacity + 16;
        stream->waiting = realloc(stream->waiting, stream->waiting_capacity * sizeof(Work));
    }
    stream->waiting[stream->waiting_count++] = work;
}

/* ---- races ---- */

static bool is_over(const Access *access, const Clock *clock) {
    return clock->steps[access->stream] >= access->step;
}

/* Drop what no later access can conflict with. */
static void drop_old_accesses(void) {
    size_t kept = 0;
    for (size_t index = 0; index < access_count; index++)
        if (!is_over(&accesses[index], &host)) accesses[kept++] = accesses[index];
    access_count = kept;
}

void forget_accesses(const void *start, size_t size) {
    const uint8_t *first = start, *end = first + size;
    size_t kept = 0;
    for (size_t index = 0; index < access_count; index++)
        if (accesses[index].end <= first || accesses[index].start >= end)
            accesses[kept++] = accesses[index];
    access_count = kept;
}

static void remember(Access access) {
    if (access_count == access_capacity) {
        drop_old_accesses();
        if (2 * access_count > access_capacity || access_capacity == 0)
            access_capacity = 2 * access_capacity + 1024;
        accesses = realloc(accesses, access_capacity * sizeof *accesses);
    }
    accesses[access_count++] = access;
}

/* Compare an access of the step that has begun with all earlier ones, and remember it. */
static bool note(Stream *stream, const char *name, const void *start, size_t size, bool writes) {
    if (size == 0) return true;
    Access new = {start, (const uint8_t *)start + size, stream->number, stream->launched, writes, ""};
    snprintf(new.name, sizeof new.name, "%s", name);
    size_t kept = 0;
    bool is_ordered = true;
    for (size_t index = 0; index < access_count; index++) {
        Access *old = &accesses[index];
        bool overlaps = old->start < new.end && new.start < old->end;
        bool conflicts = overlaps && (old->writes || writes);
        if (conflicts && !is_over(old, &stream->clock))
            is_ordered = refuse(
                "race: %s (%s) in stream %d does not wait for %s (%s) in stream %d", name,
                writes ? "writes" : "reads", new.stream, old->name, old->writes ? "wrote" : "read",
                old->stream
            );
        /* What must wait for the old access must wait for the new one, which comes after it. */
        bool is_inside = new.start <= old->start && old->end <= new.end;
        bool is_replaced = is_inside && is_over(old, &stream->clock) && (writes || !old->writes);
        if (!is_replaced) accesses[kept++] = *old;
    }
    access_count = kept;
    remember(new);
    return is_ordered;
}

/* Whether all bytes may be touched: pageable memory is none of the device's business. */
static bool may_touch(const char *name, const void *start, size_t size) {
    Range *range = range_at(start);
    if (size == 0) return true;
    if (range == NULL) return fault("%s uses memory that is not allocated: %p", name, start);
    if (is_covered(start, size)) return true;
    return fault(
        "%s reaches beyond its memory: %zu bytes at %p, where %zu are left", name, size, start,
        (size_t)(range->start + range->size - (const uint8_t *)start)
    );
}

/* ---- what is launched ---- */

static bool is_waiting_for(const uint8_t *start, size_t size) {
    for (int number = 0; number < MAX_STREAMS; number++) {
        Stream *stream = streams[number];
        for (size_t index = 0; stream != NULL && index < stream->waiting_count; index++) {
            Work *work = &stream->waiting[index];
            if (work->kind != COPY && work->kind != FILL) continue;
            const uint8_t *source = work->source, *target = work->target;
            if (source < start + size && start < source + work->size) return true;
            if (target < start + size && start < target + work->size) return true;
        }
    }
    return false;
}

static bool is_on_device(const void *address) {
    Range *range = range_at(address);
    return range != NULL && range->place == ON_DEVICE;
}

static const char *copy_name(const void *target, const void *source) {
    if (!is_on_device(target)) return "a copy to the host";
    return is_on_device(source) ? "a copy on the device" : "a copy to the device";
}

static bool copy(Stream *stream, void *target, const void *source, size_t size) {
    if (size == 0) return true;
    if (device_is_lost()) return false;
    bool from_pageable = range_at(source) == NULL;
    bool to_pageable = range_at(target) == NULL;
    const char *name = copy_name(target, source);
    if (!from_pageable && !may_touch(name, source, size)) return false;
    if (!to_pageable && !may_touch(name, target, size)) return false;
    if (to_pageable) { /* the host waits for it */
        if (!run_until(stream, stream->launched)) return false;
        begin_executed_step(stream);
        bool is_ordered = from_pageable || note(stream, name, source, size, false);
        memmove(target, source, size);
        join(&host, &stream->clock);
        return is_ordered;
    }
    Work work = {.kind = COPY, .target = target, .source = source, .size = size};
    if (from_pageable) { /* the driver reads it before it returns */
        work.staging = malloc(size);
        memcpy(work.staging, source, size);
    }
    /* Until the copy is over, the host must not read what it will write. */
    if (range_at(target)->place == PINNED && !is_waiting_for(target, size))
        memset(target, NAN_BYTE, size);
    launch(stream, work);
    return (from_pageable || note(stream, name, source, size, false)) &&
           note(stream, name, target, size, true);
}

bool stream_copy(Stream *stream, void *target, const void *source, size_t size) {
    lock();
    bool is_done = copy(stream, target, source, size);
    unlock();
    return is_done;
}

bool stream_fill(Stream *stream, void *target, int value, size_t size) {
    lock();
    bool is_done = !device_is_lost() && may_touch("a fill", target, size);
    if (is_done) {
        launch(stream, (Work){.kind = FILL, .target = target, .value = value, .size = size});
        is_done = note(stream, "a fill", target, size, true);
    }
    unlock();
    return is_done;
}

void stream_call(Stream *stream, Call function, void *data) {
    lock();
    launch(stream, (Work){.kind = CALL, .function = function, .data = data});
    unlock();
}

bool stream_kernel(
    Stream *stream, const char *name, int count, void *const *starts, const size_t *sizes,
    const bool *writes
) {
    lock();
    bool is_ready = !device_is_lost() && run_until(stream, stream->launched);
    if (is_ready) begin_executed_step(stream);
    for (int index = 0; is_ready && index < count; index++)
        is_ready = may_touch(name, starts[index], sizes[index]) &&
                   note(stream, name, starts[index], sizes[index], writes[index]);
    unlock();
    return is_ready;
}

/* Who asks again and again must see an end, but never at once. */
static bool ask(Stream *stream, uint64_t step) {
    if (stream->executed >= step) return true;
    run_until(stream, stream->executed + 1);
    return false;
}

bool stream_query(Stream *stream) {
    lock();
    bool is_idle = ask(stream, stream->launched);
    if (is_idle) join(&host, &stream->clock);
    unlock();
    return is_idle;
}

bool stream_synchronize(Stream *stream) {
    lock();
    bool is_done = !device_is_lost() && run_until(stream, stream->launched);
    join(&host, &stream->clock);
    unlock();
    return is_done;
}

bool device_synchronize(void) {
    lock();
    bool is_done = !device_is_lost() && run_all();
    unlock();
    return is_done;
}

/* ---- events ---- */

Event *event_create(void) {
    Event *event = calloc(1, sizeof(Event));
    event->uses = 1;
    return event;
}

void event_destroy(Event *event) {
    lock();
    let_go(event);
    unlock();
}

void event_record(Event *event, Stream *stream) {
    lock();
    event->uses++;
    launch(stream, (Work){.kind = RECORD, .event = event});
    event->stream = stream;
    event->step = stream->launched;
    event->clock = stream->clock;
    unlock();
}

void event_wait(Event *event, Stream *stream) {
    lock();
    if (event->stream != NULL) {
        launch(stream, (Work){.kind = WAIT, .other = event->stream, .step = event->step});
        join(&stream->clock, &event->clock);
    }
    unlock();
}

bool event_query(Event *event) {
    lock();
    bool is_reached = event->stream == NULL || ask(event->stream, event->step);
    if (is_reached) join(&host, &event->clock);
    unlock();
    return is_reached;
}

bool event_synchronize(Event *event) {
    lock();
    bool is_done = !device_is_lost();
    if (is_done && event->stream != NULL) is_done = run_until(event->stream, event->step);
    join(&host, &event->clock);
    unlock();
    return is_done;
}

bool event_seconds(Event *begin, Event *end, double *seconds) {
    lock();
    bool are_reached = begin->stream != NULL && end->stream != NULL &&
                       begin->stream->executed >= begin->step && end->stream->executed >= end->step;
    if (are_reached) *seconds = end->seconds - begin->seconds;
    unlock();
    return are_reached;
}
