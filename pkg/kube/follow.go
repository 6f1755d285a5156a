package kube

import (
	"context"
	"errors"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// follow keeps store up to date with the metadata of the objects that match, until ctx is
// done. client-go's reflector lists and watches the objects. After a failure it starts again,
// with its own backoff. follow calls report with the outcome of each request that ends before
// ctx is done: nil, or why it failed.
func (c *Client) follow(
	ctx context.Context, resource schema.GroupVersionResource, namespace string, match metav1.ListOptions,
	store cache.ReflectorStore, report func(error),
) {
	objects := c.watches.Resource(resource).Namespace(namespace)
	c.followObjects(ctx, source{
		list:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return objects.List(ctx, o) },
		watch: objects.Watch,
	}, match, &metav1.PartialObjectMetadata{}, store, report)
}

// source lists and watches objects.
type source struct {
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// followObjects is like follow, but keeps objects that from lists and watches. example is an empty object of
// their kind.
func (c *Client) followObjects(
	ctx context.Context, from source, match metav1.ListOptions, example runtime.Object,
	store cache.ReflectorStore, report func(error),
) {
	// A request that fails because ctx is done says nothing about the API server.
	reportUnlessDone := func(ctx context.Context, err error) {
		if ctx.Err() == nil {
			report(err)
		}
	}
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := from.list(ctx, matching(o, match))
			reportUnlessDone(ctx, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := from.watch(ctx, matching(o, match))
			// An API server without the feature WatchList refuses a watch that begins with the present objects (422).
			// That is no failure: the reflector then asks for a list, and the outcome of that request is reported.
			if o.SendInitialEvents == nil || !apierrors.IsInvalid(err) {
				reportUnlessDone(ctx, err)
			}
			// For these errors the reflector would wait up to a minute, even after ctx is done. After others, it asks for a
			// list, and then waits for ctx as well.
			if o.SendInitialEvents != nil && (utilnet.IsConnectionRefused(err) || apierrors.IsTooManyRequests(err)) {
				err = errors.New(err.Error())
			}
			return w, err
		},
	}
	discard := logr.Discard() // report gets what the reflector would log
	reflector := cache.NewReflectorWithOptions(lw, example, store, cache.ReflectorOptions{Logger: &discard})
	reflector.RunWithContext(klog.NewContext(ctx, discard))
}

// matching returns the list options o with the selectors of match.
func matching(o, match metav1.ListOptions) metav1.ListOptions {
	o.LabelSelector, o.FieldSelector = match.LabelSelector, match.FieldSelector
	return o
}
