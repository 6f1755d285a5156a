package kube

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"tunnel.example/tunnel/internal/testkit"
)

// An API server without WatchList is no failure.
func TestFollowWithoutWatchList(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := serve(t, listAndWatchMetadata(ctx, t, []string{metadataJSON("edge1", "1")}, nil))
	log, lines := testkit.NewLog()
	nodes, err := s.Nodes("", log)
	if err != nil {
		t.Fatal(err)
	}
	running := testkit.Run(t, nodes.Run)
	testkit.Eventually(t, "the node is known", func() bool { may, _ := nodes.May("edge1"); return may })
	cancel()
	running.Stop()
	if got := lines.String(); got != "" {
		t.Errorf("the log is %s", got)
	}
}

// A request that fails because the context ends is not reported as a success, so the log does not
// say that objects "can be read again".
func TestFollowEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := errors.New("refused")
		ctx, cancel := context.WithCancel(t.Context())
		lists := 0
		var reported []error
		new(Client).followObjects(ctx, source{
			list: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
				if lists++; lists == 2 {
					cancel()
				}
				return nil, refused
			},
			watch: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return nil, refused },
		}, metav1.ListOptions{}, &metav1.PartialObjectMetadata{}, cache.NewStore(cache.MetaNamespaceKeyFunc),
			func(err error) { reported = append(reported, err) })
		if lists < 2 || len(reported) == 0 || slices.Contains(reported, nil) {
			t.Errorf("%d lists, all refused, were reported as %v", lists, reported)
		}
	})
}

// While the API server refuses connections, the reflector waits for the end of ctx, too: a cloud can stop.
func TestFollowEndsWhileRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		refused := fmt.Errorf("dial: %w", syscall.ECONNREFUSED)
		done := make(chan struct{})
		go func() {
			defer close(done)
			new(Client).followObjects(ctx, source{
				list:  func(context.Context, metav1.ListOptions) (runtime.Object, error) { return nil, refused },
				watch: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return nil, refused },
			}, metav1.ListOptions{}, &metav1.PartialObjectMetadata{}, cache.NewStore(cache.MetaNamespaceKeyFunc), func(error) {})
		}()
		time.Sleep(2 * time.Minute)
		cancel()
		began := time.Now()
		<-done
		if took := time.Since(began); took > time.Second {
			t.Errorf("it ends after %v", took)
		}
	})
}
