// The network of a mesh: messages between a coordinator (node 0) and joiners (ids that it assigns), over ZeroMQ with
// CURVE. A thread of its own owns all sockets; what is called here never waits for a peer. Beside net_wait, every
// function is short, and any thread may call it. One file of the program includes this; without ZeroMQ it is
// net_none.h.
//
//   Net *net = net_host("tcp://0.0.0.0:29500", &keys, NULL);     or net_join(&token, "tcp://0.0.0.0:*", NULL)
//   while (net_wait(net, 0.1) == 0) {                            other work between
//       NetEvent event;
//       while (net_next(net, &event) == 1) { ...  NET_HELLO: net_admit(net, event.from, id);  free(event.data); }
//   }
//   net_send(net, id, 0, channel, tensor, n_bytes);              copied; while net_queued(net, id) is small
//   net_close(net);                                              at once, what is queued is gone
//
// What is promised: messages of one class (control, bulk, files) from one node to another arrive once, whole and in
// order, whatever happens to connections in between, until net_drop or NET_UNKNOWN ends it.
#ifndef LLMC_NET_H
#define LLMC_NET_H

#include "net_types.h"

#ifndef WITH_ZMQ
#include "net_none.h"
#else
#include "net_token.h"
#include "net_engine.h"
#endif

#endif
