package kube

import (
	"context"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// follow keeps store up to date with the metadata of the objects that match, until ctx
// is done: client-go's reflector lists, watches, and begins anew, with a backoff of its
// own, when it has to. said gets the outcome of each request before ctx is done: nil, or why
// it failed.
func (c *Client) follow(ctx context.Context, resource schema.GroupVersionResource, namespace string, match metav1.ListOptions,
	store cache.ReflectorStore, said func(error),
) {
	objects := c.watches.Resource(resource).Namespace(namespace)
	c.followObjects(ctx, source{
		list:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return objects.List(ctx, o) },
		watch: objects.Watch,
	}, match, &metav1.PartialObjectMetadata{}, store, said)
}

// source is where objects are read.
type source struct {
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// followObjects is follow for objects of any kind; example is one of them.
func (c *Client) followObjects(ctx context.Context, from source, match metav1.ListOptions, example runtime.Object,
	store cache.ReflectorStore, said func(error),
) {
	// A request during which ctx ends says nothing about the API server.
	report := func(ctx context.Context, err error) {
		if ctx.Err() == nil {
			said(err)
		}
	}
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := from.list(ctx, matching(o, match))
			report(ctx, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := from.watch(ctx, matching(o, match))
			report(ctx, err)
			return w, err
		},
	}
	silent := logr.Discard() // what it would log, said gets
	reflector := cache.NewReflectorWithOptions(lw, example, store, cache.ReflectorOptions{Logger: &silent})
	reflector.RunWithContext(klog.NewContext(ctx, silent))
}

func matching(o, match metav1.ListOptions) metav1.ListOptions {
	o.LabelSelector, o.FieldSelector = match.LabelSelector, match.FieldSelector
	return o
}
