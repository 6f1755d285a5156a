// Package join proves how a node joins: by the commands that a person types, with real
// processes and sockets.
//
// flow_test.go is the whole way of a newcomer, from `tunnel init` to `tunnel token
// revoke`; fail_test.go is everything that may be wrong on the way, and what is said
// about it. What is printed and logged is searched for secrets at the end of each test.
package join
