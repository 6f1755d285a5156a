// Package hostile holds tests in which somebody means harm to a cloud: an edge with a
// good credential, strangers at its ports, callers with a certificate and without, a
// kubelet. Cloud, edge and attackers are processes of their own. Attackers are the test's
// program, which speaks HTTP/2 and TLS by hand where a library would be too polite.
//
//	go test ./test/hostile       what each attack is answered with, in a minute or two
//	make hostile                 the same for long enough to weigh its effect on others
//
// While an attack goes on a well-behaved edge of the same cloud serves well-behaved
// callers, by turns with calm. What is looked at: nobody panics, nothing ends that should
// not, memory stays within what the limits promise, the offender is told by a code, and,
// in the long form, the 99th of a hundred requests of others takes no more than twice as
// long as in calm. Attackers keep a pace of thousands of messages a second and have the
// lowest priority in the long form: they share the processors with what they attack.
//
// The canary tests put marked secrets wherever there are secrets, provoke errors of every
// kind, and look for the marks in all that comes out.
package hostile
