package kube

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
)

// This file lists and watches objects with their fields, for the users for which metadata is not enough. It decodes
// only the fields that this package declares.

// The API groups of the objects.
var (
	v1          = schema.GroupVersion{Version: "v1"}                            //nolint:gochecknoglobals // a constant
	discoveryV1 = schema.GroupVersion{Group: "discovery.k8s.io", Version: "v1"} //nolint:gochecknoglobals // a constant
)

// The paths of the objects' collections, in all namespaces.
const (
	nodesPath          = "/api/v1/nodes"
	servicesPath       = "/api/v1/services"
	endpointSlicesPath = "/apis/discovery.k8s.io/v1/endpointslices"
)

// wholeClient returns a REST client that decodes objects into the types of this package.
func wholeClient(config *rest.Config) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, v1)
	metav1.AddToGroupVersion(scheme, discoveryV1)
	scheme.AddKnownTypeWithName(v1.WithKind("Node"), &nodeObject{})
	scheme.AddKnownTypeWithName(v1.WithKind("NodeList"), &nodeList{})
	scheme.AddKnownTypeWithName(v1.WithKind("Service"), &serviceObject{})
	scheme.AddKnownTypeWithName(v1.WithKind("ServiceList"), &serviceList{})
	scheme.AddKnownTypeWithName(discoveryV1.WithKind("EndpointSlice"), &sliceObject{})
	scheme.AddKnownTypeWithName(discoveryV1.WithKind("EndpointSliceList"), &sliceList{})
	return restClient(config, scheme)
}

// wholeObjects returns the source of the objects at a path. list returns an empty list of their kind.
func (c *Client) wholeObjects(path string, list func() runtime.Object) source {
	request := func(o metav1.ListOptions) *rest.Request {
		return c.whole.Get().AbsPath(path).SpecificallyVersionedParams(&o, metav1.ParameterCodec, v1)
	}
	return source{
		list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			all := list()
			return all, request(o).Do(ctx).Into(all)
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			return request(o).Watch(ctx)
		},
	}
}
