// Package kube is a client for the parts of Kubernetes that the cloud needs:
//
//   - [Nodes]: the names of the nodes
//   - [Reaches]: the addresses that each node reaches
//   - [Pods]: the node of a pod
//   - [Services]: the Services of the cluster, with their endpoints
//   - [Mirrors]: Services to mirror, and the objects that mirror them
//   - [ConfigMap]: one key of a ConfigMap
//   - [Client.Secret]: the data of a Secret, for tunnel init
//   - [Lease]: a Lease to elect a writer
//   - [Signer]: certificates for nodes
//   - [Client.Replicas]: the addresses of a Service's pods
//   - [Client.ReviewToken]: the owner of a token
//
// For example:
//
//	c, err := kube.New(os.Getenv("KUBECONFIG"), "tunnel/v1.2.3")
//	cm := c.ConfigMap("tunnel-system", "tunnel-nodes", "hosts")
//	old, err := cm.Load(ctx)
//	now, err := cm.Save(ctx, old, text) // ReasonFor(err) == Conflict: another writer was faster
//
// It uses client-go's REST client, metadata client and reflector. It does not use the
// typed API, which would cost more than these three together. Objects are changed by
// merge patches that carry the resource version at which they were read. So a patch
// touches only our own fields, and two writers never overwrite each other. The package
// does not retry requests, so that a caller can choose its own backoff and report what
// it waits for. Exceptions: [Nodes], [Pods], [Reaches], [Services], [Mirrors] and [Lease] retry while they run.
//
// deployment/cloud-rbac.yaml says what each right is for.
package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// requestTimeout bounds one request, except watches. A Lease must be renewed within
	// renewDeadline, so two requests must fit into it.
	requestTimeout = 4 * time.Second

	// The rate limit of all requests without a limit of their own. It guards against
	// mistakes in our own code: normal use is one or two requests a second.
	requestsPerSecond = 20
	requestBurst      = 40

	// The rate limit of requests that joining nodes cause: token reviews and certificates.
	// Thousands of nodes may come back at once. They must not wait for the limit above, and
	// must not delay a Lease.
	joinsPerSecond = 200
	joinBurst      = 400

	// The rate limit of writes of twins. When a replica stops, all EndpointSlices of twins must lose it within seconds,
	// and a Lease must not wait for them.
	twinsPerSecond = 100
	twinBurst      = 200

	// The rate limit of reads of pods.
	podsPerSecond = 100
	podBurst      = 200
)

// Client is a client of one Kubernetes API server. Any goroutine may use it. Its fields are
// set once. Kinds of requests that need their own rate limit have a client of their own.
type Client struct {
	objects objects            // for ConfigMaps, Leases and ServiceCIDRs
	twins   objects            // for Services and EndpointSlices
	joins   objects            // for token reviews and certificates
	pods    objects            // for Pods
	whole   *rest.RESTClient   // for whole objects: Reaches, Services and Mirrors watch them
	watches metadata.Interface // for metadata of objects: Nodes and ConfigMap.Follow watch it
	host    string             // address of the API server, as the kubeconfig has it
}

// New returns a client for the API server that the file kubeconfig names. If kubeconfig is
// empty, New uses the service account of the pod in which the process runs. It does not
// connect yet.
func New(kubeconfig, userAgent string) (*Client, error) {
	config, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	config.UserAgent = userAgent
	config.QPS, config.Burst = requestsPerSecond, requestBurst
	config.WarningHandlerWithContext = rest.NoWarnings{} // warnings are about deprecated APIs, and this package uses none

	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, v1) // for the Status object of a failed request
	client, err := restClient(config, scheme)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	watches, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	whole, err := wholeClient(config)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	config.QPS, config.Burst = joinsPerSecond, joinBurst
	joins, err := restClient(config, scheme)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	config.QPS, config.Burst = twinsPerSecond, twinBurst
	twins, err := restClient(config, scheme)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	config.QPS, config.Burst = podsPerSecond, podBurst
	pods, err := restClient(config, scheme)
	if err != nil {
		return nil, fmt.Errorf("kubernetes client: %w", err)
	}
	return &Client{
		objects: restObjects{client}, twins: restObjects{twins}, joins: restObjects{joins}, pods: restObjects{pods},
		whole: whole, watches: watches, host: config.Host,
	}, nil
}

// restClient returns a REST client for the types of a scheme.
func restClient(config *rest.Config, scheme *runtime.Scheme) (*rest.RESTClient, error) {
	config = rest.CopyConfig(config)
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.GroupVersion = &v1
	return rest.UnversionedRESTClientFor(config)
}

// Host returns the address of the API server, for logs.
func (c *Client) Host() string { return c.host }

// restConfig reads the file kubeconfig, or the pod's service account if kubeconfig is empty.
func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
		}
		return config, nil
	}
	config, err := rest.InClusterConfig()
	switch {
	case errors.Is(err, rest.ErrNotInCluster):
		return nil, errors.New("this is no pod, and KUBECONFIG is not set: set it to the file that names the API server, " +
			"or run without Kubernetes: without configmap in [mode.cloud.stream.dns], " +
			"serviceaccounts and signer in [mode.cloud.join], a ConfigMap as inventory in [mode.cloud.admin], " +
			"kubernetes in [mode.cloud.https] and [mode.cloud.egress], and [mode.cloud.services]")
	case err != nil:
		return nil, fmt.Errorf("reading the pod's service account (is automountServiceAccountToken off?): %w", err)
	}
	return config, nil
}

// objects are the operations on an API server that this package needs. Tests implement them
// in memory. Errors are those of apimachinery's api/errors.
type objects interface {
	// get reads the object at a path into out.
	get(ctx context.Context, path string, out any) error
	// list reads the objects of a collection that match a label selector.
	list(ctx context.Context, path, selector string, out any) error
	// create posts an object to the path of its collection.
	create(ctx context.Context, path string, object, out any) error
	// patch applies a merge patch (RFC 7386) to the object at a path; out gets only the object's
	// new metadata.
	patch(ctx context.Context, path string, patch, out any) error
	// delete removes the object at a path, if its resource version is still version; "": whatever its version.
	delete(ctx context.Context, path, version string) error
}

// restObjects implements objects with a REST client.
type restObjects struct{ client *rest.RESTClient }

func (o restObjects) get(ctx context.Context, path string, out any) error {
	return do(ctx, o.client.Get().AbsPath(path), out)
}

func (o restObjects) list(ctx context.Context, path, selector string, out any) error {
	return do(ctx, o.client.Get().AbsPath(path).Param("labelSelector", selector), out)
}

func (o restObjects) create(ctx context.Context, path string, object, out any) error {
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	return do(ctx, o.client.Post().AbsPath(path).SetHeader("Content-Type", "application/json").Body(body), out)
}

func (o restObjects) patch(ctx context.Context, path string, patch, out any) error {
	body, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	return do(ctx, o.client.Patch(types.MergePatchType).AbsPath(path).
		SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1").Body(body), out)
}

func (o restObjects) delete(ctx context.Context, path, version string) error {
	request := o.client.Delete().AbsPath(path)
	if version != "" {
		body, err := json.Marshal(metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &version}})
		if err != nil {
			return err
		}
		request = request.SetHeader("Content-Type", "application/json").Body(body)
	}
	return do(ctx, request, new(struct{}))
}

// do sends a request once, within requestTimeout, and decodes the answer into out.
func do(ctx context.Context, r *rest.Request, out any) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	result := r.MaxRetries(0).Do(ctx)
	if err := result.Error(); err != nil {
		return err
	}
	body, err := result.Raw()
	if err != nil {
		return err
	}
	return json.Unmarshal(body, out)
}

// object is embedded in every kind of object here. It holds the fields of all kinds that this package uses.
type object struct {
	Metadata struct {
		Name            string `json:"name,omitempty"`
		Namespace       string `json:"namespace,omitempty"`
		ResourceVersion string `json:"resourceVersion,omitempty"`
	} `json:"metadata"`
}

// named returns an object's metadata for a create or a patch. A patch with a version fails with a
// conflict if the object has changed since that version, or if another object now has the name.
func named(namespace, name, version string) object {
	var o object
	o.Metadata.Namespace, o.Metadata.Name, o.Metadata.ResourceVersion = namespace, name, version
	return o
}

func configMaps(namespace string) string {
	return path.Join("/api/v1/namespaces", namespace, "configmaps")
}

func leases(namespace string) string {
	return path.Join("/apis/coordination.k8s.io/v1/namespaces", namespace, "leases")
}

func endpointSlices(namespace string) string {
	return path.Join("/apis/discovery.k8s.io/v1/namespaces", namespace, "endpointslices")
}
