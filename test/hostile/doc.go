// Package hostile holds tests in which somebody means harm to a cloud: an edge with a
// good credential, strangers at its ports, callers with a certificate and without, a
// kubelet. Cloud and edge are processes of their own (test/rig); who means harm is the
// test itself, which speaks HTTP/2 and TLS by hand where a library would be too polite.
//
//	go test ./test/hostile       what each attack is answered with, in half a minute
//	make hostile                 the same for long enough to weigh its effect on others
//
// While an attack goes on a well-behaved edge of the same cloud serves well-behaved
// callers, by turns with calm and, in the long form, with the same attack on another cloud
// of this machine: attackers take processors, too. What is looked at: nobody panics, nothing ends that should
// not, memory stays within what the limits promise, others wait little longer, and the
// offender is told by a code. Attackers keep a pace of thousands of messages a second,
// since they share the processors with what they attack.
//
// The canary tests put marked secrets wherever there are secrets, provoke errors of every
// kind, and look for the marks in all that comes out.
package hostile
