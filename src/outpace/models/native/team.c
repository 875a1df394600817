/* A team of threads that share out the tasks of one phase after another.
 *
 * The threads are those of the OpenMP runtime that torch has loaded, so that two pools never spin against each other.
 * Its entry point is looked up by name: no compiler flag, and no second runtime.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>

#include "outpace.h"

enum { SPINS = 2000 }; /* pauses before a waiting thread offers its core to others: some 50 us */

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*Query)(void);

static Parallel start_team;
static Query team_size, member_index;

typedef struct {
    Team team;
    void (*work)(void *, Member *);
    void *argument;
} Region;

static void enter(void *data) {
    Region *region = data;
    Member member = {&region->team, team_size(), member_index(), 0};
    region->work(region->argument, &member);
}

void run_team(int threads, void (*work)(void *, Member *), void *argument) {
    if (!start_team) {
        team_size = (Query)dlsym(RTLD_DEFAULT, "omp_get_num_threads");
        member_index = (Query)dlsym(RTLD_DEFAULT, "omp_get_thread_num");
        start_team = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    }
    Region region = {.work = work, .argument = argument};
    if (threads > 1 && start_team && team_size && member_index) {
        start_team(enter, &region, (unsigned)threads, 0);
    } else {
        Member alone = {&region.team, 1, 0, 0};
        work(argument, &alone);
    }
}

void meet(Member *member) {
    Team *team = member->team;
    int turn = ++member->turn;
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == member->size - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->turn, turn, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->turn, memory_order_acquire) != turn; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
}
