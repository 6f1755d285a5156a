package relay

import (
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

// A load balancer asks the node at the healthCheckNodePort of a Service. The answer is 200 if a ready endpoint of the
// Service is on this node, and 503 if there is none.
func TestHealthPort(t *testing.T) {
	k, c := new(fake), newCloud()
	r, log := newTestRelay(t, k, c)
	r.cfg.Full, r.planner.full, r.every = true, true, 10*time.Millisecond
	port := testkit.FreePort(t)
	taken, err := net.Listen("tcp", ":"+strconv.Itoa(port))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Run(t, r.Run)
	<-c.nexts
	send := func(changes *pb.Changes) {
		c.batches <- batch(t, false, changes)
		<-c.nexts
	}
	local := webService()
	local.ExternalLocal, local.HealthCheckNodePort = true, uint32(port)
	here, elsewhere := endpoint("10.88.1.5", "edge1"), endpoint("10.88.2.5", "edge2")
	here.Ready = false
	send(&pb.Changes{Set: []*pb.Item{item(t, web, local), item(t, other, here), item(t, far4, elsewhere)}})
	testkit.Eventually(t, "a warning that the port is taken", func() bool {
		return len(log.Lines("health check port of a Service cannot be opened")) > 0
	})
	taken.Close()

	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	want := func(status int, body string) {
		t.Helper()
		var got string
		testkit.Eventually(t, strconv.Itoa(status)+" "+body, func() bool {
			answer, err := client.Get("http://127.0.0.1:" + strconv.Itoa(port) + "/")
			if err != nil {
				got = err.Error()
				return false
			}
			defer answer.Body.Close()
			text, _ := io.ReadAll(answer.Body)
			got = strings.TrimSpace(string(text))
			return answer.StatusCode == status && got == body
		})
	}
	const service = `"service":{"name":"web","namespace":"shop"},"serviceProxyHealthy":true}`
	want(http.StatusServiceUnavailable, `{"localEndpoints":0,`+service)
	here.Ready = true
	send(&pb.Changes{Set: []*pb.Item{item(t, other, here)}})
	want(http.StatusOK, `{"localEndpoints":1,`+service)
	send(&pb.Changes{Deleted: []services.Path{web}})
	testkit.Eventually(t, "the port is closed", func() bool {
		answer, err := client.Get("http://127.0.0.1:" + strconv.Itoa(port) + "/")
		if err == nil {
			answer.Body.Close()
		}
		return err != nil
	})
}

// Beside kube-proxy, kube-proxy answers.
func TestNoHealthPortBesideKubeProxy(t *testing.T) {
	local := webService()
	local.HealthCheckNodePort = 32000
	if at, ok := (planner{node: "edge1"}).healthOf(web, local); ok {
		t.Errorf("the edge answers at %d", at.port)
	}
}
