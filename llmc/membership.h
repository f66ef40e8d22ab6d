// Who is in a run over several machines: members, their roles, and how far they are. The coordinator's bookkeeping; it
// knows neither sockets nor clocks, so that it can be tested without them.
//
// A role is a cell, replica * stages + stage, or the anchor, the number behind the last cell. A replica lives once all
// its cells are placed, and as long as all of them stay.
//
//   NEW --a role--> LOADING --has memory and data--> READY --place--> PLACED --has its state--> RUNNING
//    |  no role is free: SPARE                         ^------------- its replica is out -----------|
//
// The run begins as soon as `min_replicas` replicas are ready, and the anchor where it is needed from the first step.
// Members go through gates: numbers that grow; a gate opens once all that run have reported there.
#ifndef LLMC_MEMBERSHIP_H
#define LLMC_MEMBERSHIP_H

#include <stdint.h> // fixed-width integers
#include <stdlib.h> // realloc, free
#include <string.h> // memset

#include "error.h"

typedef enum {
    MEMBER_SPARE,   // waits for a role
    MEMBER_LOADING, // has one, gets memory and data ready
    MEMBER_READY,   // waits to be placed
    MEMBER_PLACED,  // takes over its state
    MEMBER_RUNNING
} MemberState;

typedef struct {
    uint32_t node;
    MemberState state;
    int role;     // -1: none
    int64_t gate; // the last it has reported at, -1: none
    int stands;   // it has the state of the step at which the run is
} Member;

typedef struct {
    int n_replicas, n_stages, anchored; // of the whole mesh; replicas of the fast circuit
    int min_replicas, needs_anchor;
    Member *members;
    int n;
} Membership;

static inline int membership_cells(const Membership *m) {
    return m->n_replicas * m->n_stages;
}

static inline int membership_roles(const Membership *m) {
    return membership_cells(m) + m->anchored;
}

static inline void membership_free(Membership *m) {
    free(m->members);
    memset(m, 0, sizeof *m);
}

static inline Member *membership_find(const Membership *m, uint32_t node) {
    for (int i = 0; i < m->n; i++)
        if (m->members[i].node == node) return &m->members[i];
    return NULL;
}

static inline Member *membership_of_role(const Membership *m, int role) {
    for (int i = 0; i < m->n; i++)
        if (m->members[i].role == role) return &m->members[i];
    return NULL;
}

// A new member without a role; NULL: no memory. Pointers to others are not valid any more.
static inline Member *membership_add(Membership *m, uint32_t node) {
    Member *members = (Member *)realloc(m->members, sizeof(Member) * (size_t)(m->n + 1));
    if (members == NULL) {
        error_set("out of memory for a member");
        return NULL;
    }
    m->members = members;
    Member *member = &members[m->n++];
    memset(member, 0, sizeof *member);
    member->node = node, member->state = MEMBER_SPARE, member->role = -1, member->gate = -1;
    return member;
}

// The role that somebody is missed in most: replicas one after the other, the anchor behind those the run begins with.
// -1: all are taken.
static inline int membership_vacancy(const Membership *m) {
    int cells = membership_cells(m), first = m->min_replicas * m->n_stages;
    for (int role = 0; role < first; role++)
        if (membership_of_role(m, role) == NULL) return role;
    if (m->anchored && membership_of_role(m, cells) == NULL) return cells;
    for (int role = first; role < cells; role++)
        if (membership_of_role(m, role) == NULL) return role;
    return -1;
}

// 1 if all cells of a replica have a member in one of the states from `least` on.
static inline int membership_has(const Membership *m, int replica, MemberState least) {
    for (int s = 0; s < m->n_stages; s++) {
        const Member *member = membership_of_role(m, replica * m->n_stages + s);
        if (member == NULL || member->state < least) return 0;
    }
    return 1;
}

// Replicas all of whose cells have come so far.
static inline int membership_replicas(const Membership *m, MemberState least) {
    int n = 0;
    for (int r = 0; r < m->n_replicas; r++) n += membership_has(m, r, least);
    return n;
}

static inline int membership_has_anchor(const Membership *m, MemberState least) {
    const Member *member = m->anchored ? membership_of_role(m, membership_cells(m)) : NULL;
    return member != NULL && member->state >= least;
}

// 1 if a run that stands still can begin.
static inline int membership_may_begin(const Membership *m) {
    return membership_replicas(m, MEMBER_READY) >= m->min_replicas &&
           (!m->needs_anchor || membership_has_anchor(m, MEMBER_READY));
}

// The first replica that runs, -1: none. It leads: its losses, norms and weights stand for the model's.
static inline int membership_lead(const Membership *m) {
    for (int r = 0; r < m->n_replicas; r++)
        if (membership_has(m, r, MEMBER_RUNNING)) return r;
    return -1;
}

// The first replica whose cells all are there and have the state of the step at which the run is, -1: none.
static inline int membership_standing(const Membership *m) {
    for (int r = 0; r < m->n_replicas; r++) {
        int all = membership_has(m, r, MEMBER_READY);
        for (int s = 0; s < m->n_stages && all; s++) all = membership_of_role(m, r * m->n_stages + s)->stands;
        if (all) return r;
    }
    return -1;
}

// Takes a member out. What is left of its replica does not run any more: those are ready to be placed again. Returns
// the replica that has died of it, -1: none, it did not run.
static inline int membership_remove(Membership *m, uint32_t node) {
    Member *member = membership_find(m, node);
    if (member == NULL) return -1;
    int role = member->role, replica = role >= 0 && role < membership_cells(m) ? role / m->n_stages : -1;
    int lived = replica >= 0 && membership_has(m, replica, MEMBER_PLACED);
    *member = m->members[--m->n];
    for (int s = 0; s < m->n_stages && replica >= 0; s++) {
        Member *other = membership_of_role(m, replica * m->n_stages + s);
        if (other == NULL) continue;
        other->stands = 0;
        if (other->state > MEMBER_READY) other->state = MEMBER_READY, other->gate = -1;
    }
    return lived ? replica : -1;
}

// 1 if all cells that run have reported at a gate; those of one stage, or of all (-1).
static inline int membership_all_at(const Membership *m, int64_t gate, int stage) {
    int n = 0;
    for (int i = 0; i < m->n; i++) {
        const Member *member = &m->members[i];
        if (member->state != MEMBER_RUNNING || member->role >= membership_cells(m)) continue;
        if (stage >= 0 && member->role % m->n_stages != stage) continue;
        if (member->gate < gate) return 0;
        n++;
    }
    return n > 0;
}

#endif
