// A meeting: the replicas of a stage average a list of shares, in small steps that go as far as what has come allows.
// So it can go on between other work, with replicas of other processes, and be given up half-way. This file knows the
// order of the messages and whose turn it is; what is in them is the caller's (train_gpt.cu, "Data parallelism").
//
// Every share has an owner among the members. The owner's own part takes the same way as the others':
//
//   member r    1 SEND what it has              3 TAKE the mean
//                    |                                ^
//                    | up(r, owner)                   | down(r, owner)
//                    v                                |
//   owner       2 MEET: once all members' parts are there, their mean, to all members
//
// A share may wait for the mean of an earlier one: the right factor of a matrix for the left. It stands behind all that
// wait for nothing, so a matrix takes two rounds on the way, and so do all matrices together:
//
//   list        values a, left b, left c, ...,   right b, right c, ...
//   member      1 1 1 ... 3 3 3 ...              1 1 ... 3 3 ...
//   owner             2 2 2 ...                      2 2 ...
//
// Each member sends and takes in the order of the list, each owner meets its shares in that order: of every link it is
// known which message comes next. What can be taken is taken first, what can be sent is sent last, so within one
// process no more than one message waits on a link.
//
//            meeting_open                     meeting_complete
//   CLOSED -------------> OPEN, meeting_next -----------------> OPEN, nothing next
//      ^                   |   meeting_moved                      |
//      |   meeting_close   |                     meeting_close    |
//      +-------------------+--------------------------------------+
//
//   meeting_alloc(&meeting, n_replicas, max_shares);
//   meeting_open(&meeting, members, hosted);  meeting_add(&meeting, share);  ...
//   for (Move move; (move = meeting_next(&meeting)).kind != MOVE_NONE; meeting_moved(&meeting, move)) ...
//
// Replicas that are not hosted are another process's: who carries messages empties up(r, owner) of hosted r and strange
// owners, down(r, owner) of hosted owners and strange r, and fills the links of the same names over there.
#ifndef LLMC_MEETING_H
#define LLMC_MEETING_H

#include <stdint.h> // int64_t
#include <stdlib.h> // calloc, free
#include <string.h> // memset

#include "error.h" // error_set
#include "link.h"  // Link

typedef enum { SHARE_VALUES, SHARE_LEFT, SHARE_RIGHT } ShareKind; // as they are; PowerSGD's factors of a matrix

typedef struct {
    ShareKind kind;
    int tensor, owner; // its place in the stage's table; a replica
    int after;         // the share whose mean it waits for, -1: none
    int64_t n, at;     // floats; where a replica keeps the mean
} Share;

// A replica at the meeting. Shares are counted in the order of the list.
typedef struct {
    int member, hosted;
    int sent, taken; // shares so far
    int met;         // all shares before this one that it owns are met
    float *values;   // (room) the caller's, on the device: means and what else is kept until the end; NULL: not hosted
    double time;     // simulated, to which the average has come
} Seat;

typedef struct {
    int n_replicas, max_shares;
    Link *up, *down; // (n_replicas, n_replicas): replica, owner
    Seat *seats;     // (n_replicas)
    Share *shares;   // (max_shares)
    int64_t room;    // floats of each seat's values
    // of the meeting at work
    int is_open, n_members, n_shares;
    int64_t floats; // of `room`, what the list needs
    // the caller's: what is averaged
    int stage, fragment, rank;
    int64_t turn; // chooses the owner
    int in_place; // means are taken to where the shares come from: it cannot be begun anew
} Meeting;

typedef enum { MOVE_NONE, MOVE_TAKE, MOVE_MEET, MOVE_SEND } MoveKind;

typedef struct {
    MoveKind kind;
    int replica, share; // who, what: a place in the list
} Move;

// What member `replica` has for the shares of `owner`, and the means that it gets.
static inline Link *meeting_up(const Meeting *meeting, int replica, int owner) {
    return &meeting->up[replica * meeting->n_replicas + owner];
}

static inline Link *meeting_down(const Meeting *meeting, int replica, int owner) {
    return &meeting->down[replica * meeting->n_replicas + owner];
}

// Gives back all but the seats' values. Of zeroed memory: nothing.
static inline void meeting_free(Meeting *meeting) {
    int n_links = meeting->n_replicas * meeting->n_replicas;
    for (int i = 0; i < n_links && meeting->up != NULL; i++) link_free(&meeting->up[i]);
    for (int i = 0; i < n_links && meeting->down != NULL; i++) link_free(&meeting->down[i]);
    free(meeting->up);
    free(meeting->down);
    free(meeting->seats);
    free(meeting->shares);
    memset(meeting, 0, sizeof *meeting);
}

// A closed meeting. Returns 0, or -1: no memory, and meeting_free takes what there is.
static inline int meeting_alloc(Meeting *meeting, int n_replicas, int max_shares) {
    size_t n = (size_t)n_replicas;
    memset(meeting, 0, sizeof *meeting);
    meeting->n_replicas = n_replicas, meeting->max_shares = max_shares;
    meeting->up = (Link *)calloc(n * n, sizeof(Link));
    meeting->down = (Link *)calloc(n * n, sizeof(Link));
    meeting->seats = (Seat *)calloc(n, sizeof(Seat));
    meeting->shares = (Share *)calloc((size_t)max_shares, sizeof(Share));
    if (meeting->up == NULL || meeting->down == NULL || meeting->seats == NULL || meeting->shares == NULL)
        return error_set("out of memory for averages of %d replicas", n_replicas);
    return 0;
}

// Ends the meeting, complete or not: messages under way are dropped.
static inline void meeting_close(Meeting *meeting) {
    for (int i = 0; i < meeting->n_replicas * meeting->n_replicas; i++) {
        if (link_waiting(&meeting->up[i]) > 0) link_free(&meeting->up[i]);
        if (link_waiting(&meeting->down[i]) > 0) link_free(&meeting->down[i]);
    }
    meeting->is_open = 0;
}

// Opens a closed meeting with an empty list. members, hosted (n_replicas): who takes part, who is of this process.
static inline void meeting_open(Meeting *meeting, const int *members, const int *hosted) {
    meeting->is_open = 1, meeting->n_members = 0, meeting->n_shares = 0, meeting->floats = 0;
    for (int r = 0; r < meeting->n_replicas; r++) {
        Seat *seat = &meeting->seats[r];
        seat->member = members[r], seat->hosted = hosted[r];
        seat->sent = seat->taken = seat->met = 0;
        meeting->n_members += members[r];
    }
}

// The replica that is number k of the members.
static inline int meeting_member(const Meeting *meeting, int k) {
    int replica = 0;
    while (!meeting->seats[replica].member || k-- > 0) replica++;
    return replica;
}

// Appends to the list.
static inline void meeting_add(Meeting *meeting, Share share) {
    meeting->shares[meeting->n_shares++] = share;
}

// Whether this process has the state of the replica, and it takes part.
static inline int meeting_hosts(const Meeting *meeting, int replica) {
    return meeting->seats[replica].member && meeting->seats[replica].hosted;
}

// Whether all members are of this process.
static inline int meeting_hosts_all(const Meeting *meeting) {
    int all = 1;
    for (int r = 0; r < meeting->n_replicas; r++) all &= meeting->seats[r].hosted || !meeting->seats[r].member;
    return all;
}

// The first share from `from` on that the replica owns; n_shares: none.
static inline int meeting_owned(const Meeting *meeting, int replica, int from) {
    while (from < meeting->n_shares && meeting->shares[from].owner != replica) from++;
    return from;
}

// Whether the parts of all members have come to the owner.
static inline int meeting_gathered(const Meeting *meeting, int owner) {
    int all = 1;
    for (int r = 0; r < meeting->n_replicas; r++)
        all &= !meeting->seats[r].member || link_waiting(meeting_up(meeting, r, owner)) > 0;
    return all;
}

// What replica r, hosted, could take, meet or send next; a share beyond the list or one that waits is MOVE_NONE.
static inline Move meeting_try(const Meeting *meeting, MoveKind kind, int r) {
    const Seat *seat = &meeting->seats[r];
    int share = kind == MOVE_TAKE ? seat->taken : kind == MOVE_SEND ? seat->sent : meeting_owned(meeting, r, seat->met);
    Move move = {MOVE_NONE, r, share};
    if (share == meeting->n_shares) return move;
    const Share *next = &meeting->shares[share];
    int can = kind == MOVE_TAKE   ? link_waiting(meeting_down(meeting, r, next->owner)) > 0
              : kind == MOVE_MEET ? meeting_gathered(meeting, r)
                                  : next->after < seat->taken;
    if (can) move.kind = kind;
    return move;
}

// What the hosted members can do now, one thing; MOVE_NONE: they wait for others, or are through. Of those that can
// send, the one that is furthest behind does.
static inline Move meeting_next(const Meeting *meeting) {
    Move best = {MOVE_NONE, 0, meeting->n_shares};
    for (int kind = MOVE_TAKE; kind <= MOVE_SEND && meeting->is_open && best.kind == MOVE_NONE; kind++) {
        for (int r = 0; r < meeting->n_replicas; r++) {
            if (!meeting_hosts(meeting, r)) continue;
            Move move = meeting_try(meeting, (MoveKind)kind, r);
            if (move.kind != MOVE_NONE && move.share < best.share) best = move;
        }
    }
    return best;
}

// The move is done: its messages have been sent and received.
static inline void meeting_moved(Meeting *meeting, Move move) {
    Seat *seat = &meeting->seats[move.replica];
    if (move.kind == MOVE_TAKE) seat->taken = move.share + 1;
    if (move.kind == MOVE_MEET) seat->met = move.share + 1;
    if (move.kind == MOVE_SEND) seat->sent = move.share + 1;
}

// Whether a message of a hosted member still waits to be carried to another process.
static inline int meeting_has_mail(const Meeting *meeting) {
    int waiting = 0;
    for (int r = 0; r < meeting->n_replicas; r++) {
        for (int other = 0; other < meeting->n_replicas && meeting_hosts(meeting, r); other++) {
            if (meeting->seats[other].hosted) continue;
            waiting |= link_waiting(meeting_up(meeting, r, other)) > 0;
            waiting |= link_waiting(meeting_down(meeting, other, r)) > 0;
        }
    }
    return waiting;
}

// Whether every hosted member has taken all means, and nothing that others wait for is still here.
static inline int meeting_complete(const Meeting *meeting) {
    int all = meeting->is_open;
    for (int r = 0; r < meeting->n_replicas; r++)
        all &= !meeting_hosts(meeting, r) || meeting->seats[r].taken == meeting->n_shares;
    return all && !meeting_has_mail(meeting);
}

#endif
