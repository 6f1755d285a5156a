// Package replicas proves what several replicas of the cloud do together, each of them
// and each edge a process of its own (test/rig): that every request succeeds wherever
// its node is held, that a replica may be killed, replaced, or cut off, and what that
// costs.
//
//	go test ./test/replicas   everything once and small: 20 seconds
//	make soak                 sizes and durations as promised, one test after the other
//
// Where things are: fleet_test.go starts what is tested; targets_test.go is what stands
// behind the edges; balancer_test.go stands before the replicas, as a Service or a load
// balancer does; traffic_test.go is what clients do; lab_test.go gives processes
// networks of their own, whose packets can be dropped. The other tests are one fault
// each.
package replicas
