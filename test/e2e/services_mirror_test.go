//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// cloudService is the Service in the cloud's namespace whose endpoints are the replicas of the cloud.
const cloudService = "tunnel-cloud-peers"

// mirror has a pod and a process beside the control plane call the Service of edge2 by a twin: the kube-proxy of
// control3 leads the ClusterIP of the twin to the cloud. The Service itself leads nowhere there, before and after.
func (s *farServices) mirror(ctx context.Context, t *testing.T) {
	const original, twin, caller = "of-edge2", "of-edge2-tunnel", "caller"
	err := s.c.apply(ctx, "mirror.yaml", "NAMESPACE", namespace, "NAME", cloudService, "ADDRESS", cloudIP)
	err = errors.Join(err, s.c.apply(ctx, "cni.yaml", "NAME", caller, "NODE", controlNode, "PORTS", "",
		"app: cni", "app: "+caller))
	if err != nil {
		t.Fatal(err)
	}
	page := func(ctx context.Context, url string) (string, error) {
		status, body, err := get(ctx, &http.Transport{DisableKeepAlives: true}, url)
		return body, is200(status, body, err)
	}
	var pod string // the address of the caller's own pages
	eventually(ctx, t, again, "the pod of "+controlNode, func(ctx context.Context) error {
		ip, err := s.c.kubectl(ctx, "get", "pod", caller, "-o", "jsonpath={.status.podIP}")
		if err == nil && ip == "" {
			err = errors.New("it has no address")
		}
		if err != nil {
			return err
		}
		pod = "http://" + ip + ":" + podPort
		_, err = page(ctx, pod+"/")
		return err
	})
	calls := func(clusterIP string) []string { // of the pod, and of the process
		return []string{pod + "/cgi-bin/get?" + clusterIP + ",80,/", "http://" + clusterIP + "/"}
	}
	answers := func(ctx context.Context, url string) error {
		body, err := page(ctx, url)
		if err == nil && !strings.Contains(body, "web-edge2") {
			err = fmt.Errorf("%s: got %q", url, body)
		}
		return err
	}
	for _, url := range calls(clusterIPOf["edge2"]) {
		if answers(ctx, url) == nil {
			t.Fatalf("%s: the pod of edge2 answers without the twin: the test proves nothing", url)
		}
	}

	const annotation = "tunnel.example/mirror"
	if _, err := s.c.kubectl(ctx, "annotate", "service", original, annotation+"=true"); err != nil {
		t.Fatal(err)
	}
	var clusterIP string
	took := eventually(ctx, t, time.Minute, "the twin to answer", func(ctx context.Context) (err error) {
		clusterIP, err = s.c.kubectl(ctx, "get", "service", twin, "-o", "jsonpath={.spec.clusterIP}")
		if err != nil {
			return err
		}
		for _, url := range calls(clusterIP) {
			if err := answers(ctx, url); err != nil {
				return err
			}
		}
		return nil
	})
	t.Logf("the twin answers %v after the annotation", took.Round(time.Millisecond))
	if _, err := s.c.kubectl(ctx, "annotate", "service", original, annotation+"-"); err != nil {
		t.Fatal(err)
	}
	took = eventually(ctx, t, time.Minute, "the twin to go", func(ctx context.Context) error {
		left, err := s.c.kubectl(ctx, "get", "services,endpointslices", "--all-namespaces", "-o", "name",
			"-l", "tunnel.example/mirrored-by="+namespace)
		if err := want(err, left, ""); err != nil {
			return err
		}
		for _, url := range append(calls(clusterIP), calls(clusterIPOf["edge2"])...) {
			if answers(ctx, url) == nil {
				return fmt.Errorf("%s: the pod of edge2 answers", url)
			}
		}
		return nil
	})
	t.Logf("the twin is gone %v after the annotation", took.Round(time.Millisecond))
}
