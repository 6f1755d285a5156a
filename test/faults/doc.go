// Package faults proves what the tunnel does when processes die, hang, stop, and meet
// what they should not. A cloud and an edge run as processes of their own (test/rig);
// the targets behind the edge and the clients in front of the cloud are in the test.
//
//	make faults   two pairs, away for 2 s, and the tests with one pair: 45 seconds
//	make soak     ten pairs, away for 2 s and for 40 s as well: two and a half minutes
//
// Where things are: targets_test.go is what stands behind the edge; traffic_test.go is
// what clients do, and what they must never see; kill_test.go kills processes under
// that traffic; renewal_test.go replaces certificates; the other tests are one fault each.
//
// What a test waits for it polls, with a deadline that is the promise to the user.
// Networks that lose or delay packets are not here.
package faults
