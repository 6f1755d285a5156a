package names_test

import (
	"fmt"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/services/names"
)

// A zone answers from a state. The state of this node knows no Service yet.
func Example() {
	zone, state := names.NewZone("cluster.local"), services.NewState()
	difference, err := state.Apply()
	if err != nil {
		fmt.Println(err)
		return
	}
	zone.Update(state, &difference)
	reply := zone.Answer(state, dns.Question{
		Name: "web.shop.svc.cluster.local.", Qtype: dns.TypeA, Qclass: dns.ClassINET,
	})
	fmt.Println(dns.RcodeToString[reply.Rcode])
	// Output: NXDOMAIN
}
