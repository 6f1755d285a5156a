package kube

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// A request that fails when the context ends is no success: nobody hears that objects "can
// be read again".
func TestFollowEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := errors.New("refused")
		ctx, cancel := context.WithCancel(t.Context())
		lists := 0
		var heard []error
		new(Client).followObjects(ctx, source{
			list: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
				if lists++; lists == 2 {
					cancel()
				}
				return nil, refused
			},
			watch: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return nil, refused },
		}, metav1.ListOptions{}, &metav1.PartialObjectMetadata{}, cache.NewStore(cache.MetaNamespaceKeyFunc), func(err error) {
			heard = append(heard, err)
		})
		if lists < 2 || len(heard) == 0 || slices.Contains(heard, nil) {
			t.Errorf("%d lists, all refused, were reported as %v", lists, heard)
		}
	})
}
